// Quantized weights: codes of 4, 5, 6 or 8 bits for sixteen bit patterns or more, and numbers for groups of columns
// (docs/weight-formats.md).  What all kernel families share.
//
// weight[n][k] = scale[n][group of k] * values[code[n][k]] + min[n][group of k], scale and min in fp32.
//
// A panel of sixteen outputs is a row of units of 32 inputs: 16 cells of two inputs by sixteen outputs, as gemm/gemm.hpp has
// them, but of codes.  Numbers lie apart in records: one a group, or one a super-block of 256 columns.
#pragma once

#include "families/family.hpp"

namespace penstock {

constexpr long kUnitColumns = 32;
constexpr long kUnitCells = 16;
constexpr long kSuperColumns = 256;

// How a scale is written; the last two are integers times an fp16 number of the super-block.
enum class ScaleKind : int { kF16 = 0, kBf16 = 1, kF32 = 2, kE8m0 = 3, kU8OfF16 = 4, kI8OfF16 = 5 };

// What is added: nothing; minus scale times an integer; an fp16 number; minus an integer times one of the super-block.
enum class MinKind : int { kNone = 0, kZeroPoint = 1, kF16 = 2, kU8OfF16 = 3 };

PS_EVERYWHERE long scale_bytes(ScaleKind kind) {
  return kind == ScaleKind::kF32 ? 4 : kind == ScaleKind::kF16 || kind == ScaleKind::kBf16 ? 2 : 1;
}
PS_EVERYWHERE long min_bytes(MinKind kind) { return kind == MinKind::kNone ? 0 : kind == MinKind::kF16 ? 2 : 1; }

// How codes are multiplied with inputs of 8 bits: as they are; as the bytes that lie in their place; by a table of 16.
enum class CodeKind : int { kLinear = 0, kByte = 1, kTable = 2 };

// Values as integers: values[code] = unit * (integer - offset), the integer being the code, its byte or the table's.
struct IntegerCodes {
  CodeKind kind;
  float unit;  // a power of two
  int32_t offset;
  alignas(16) int8_t table[16];
};

// Rows of a weight that are written alike: whole panels, but for the last of the weight.
struct QuantPart {
  const uint8_t* codes;    // [panels][units][64 * bits]
  const uint8_t* scales;   // [panels][records][record_bytes()]
  const uint16_t* values;  // bf16 [2 ** bits], 64-byte aligned
  int bits;
  long group;  // columns: 16 or a multiple of 32
  ScaleKind scale;
  MinKind min;
  long first_panel;
  long panels;
  long units;
  const IntegerCodes* integers = nullptr;  // null, or codes lie as quantized/int8_codes.hpp has them
  int zero_code = -1;  // values[code] == code - zero_code for all codes; -1: they are others

  PS_EVERYWHERE long unit_bytes() const { return 64 * bits; }
  PS_EVERYWHERE bool has_super() const { return scale == ScaleKind::kU8OfF16 || scale == ScaleKind::kI8OfF16; }
  PS_EVERYWHERE long record_columns() const { return has_super() ? kSuperColumns : group; }
  PS_EVERYWHERE long records() const { return (units * kUnitColumns + record_columns() - 1) / record_columns(); }
  PS_EVERYWHERE long record_bytes() const {
    const long own = 16 * (scale_bytes(scale) + min_bytes(min));
    if (!has_super()) return own;
    return 32 + (min == MinKind::kU8OfF16 ? 32 : 0) + kSuperColumns / group * own;
  }
  PS_EVERYWHERE long panel_bytes() const { return units * unit_bytes(); }
  PS_EVERYWHERE const uint8_t* unit(long panel, long index) const {
    return codes + panel * panel_bytes() + index * unit_bytes();
  }
  PS_EVERYWHERE const uint8_t* record(long panel, long index) const {
    return scales + (panel * records() + index) * record_bytes();
  }
};

struct QuantView {
  const QuantPart* parts;  // one below the other
  long count;
  PackedView layout;  // two inputs a cell, without cells; segments end with a unit
  const int32_t* order = nullptr;  // null, or [k]: which input each column is multiplied with
  bool int8_inputs = false;        // inputs are quantized to 8 bits; every part has integers
};

using QuantLinearArgs = LinearArgsOf<QuantView>;
using QuantGroup = LinearGroupOf<QuantView>;
using QuantEmbedArgs = EmbedArgsOf<QuantView>;

struct QuantFamily {
  const char* name;
  void (*linear)(const QuantLinearArgs&, Compute);
  void (*linear_group)(const QuantGroup&, Compute);
  void (*embed)(const QuantEmbedArgs&);
};

// The kernels for a family that this processor runs.
const QuantFamily& quantized_family(const char* name);

}  // namespace penstock
