// Rows of inputs as integers of 8 bits: for each block of columns the nearest multiples of its largest size by 127.
//
// Blocks are 32 columns, or where scales are integers of a super-block its 256, cut at the ends of segments: so a part of K
// that a device multiplies alone has its own blocks.  A row's integers depend on that row alone.
#pragma once

#include "gemm/gemm.hpp"
#include "quantized/quantized.hpp"

namespace {

constexpr long kSumColumns = 16;

// Rows in memory: integers, then sums of every 16, then the scale of every 32 columns.
struct Int8Rows {
  char* data;
  long k;

  static size_t row_bytes(long k) {
    const size_t bytes = static_cast<size_t>(k + k / kSumColumns * 2 + k / kUnitColumns * 4);
    return (bytes + 63) / 64 * 64;
  }
  int8_t* values(long row) const { return reinterpret_cast<int8_t*>(data + static_cast<size_t>(row) * row_bytes(k)); }
  int16_t* sums(long row) const { return reinterpret_cast<int16_t*>(values(row) + k); }
  float* scales(long row) const { return reinterpret_cast<float*>(sums(row) + k / kSumColumns); }
};

template <class D>
PS_INLINE F16 load_inputs(const typename D::Value* from) {
  if constexpr (D::kPerCell == 1) return load(from);
  HalfReg half[kParts];
  U16 words;
  __builtin_memcpy(half, from, 32);
  PS_EACH_PART words.part[i] = __builtin_convertvector(half[i], WordReg);
  return bits_as<F16>(words << 16);
}

PS_INLINE float float_of(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

constexpr uint32_t kNoNumber = 0x7F800000u;  // infinity; NaN is above
constexpr uint32_t kTiny = 0x0D800000u;      // 2 ** -100: what is smaller counts as zero
constexpr float kRounding = 0x1.8p23f;       // added to a small number: its nearest integer, ties to even

// The scale of a block and what its inputs are multiplied with before they are rounded.
struct BlockScale {
  float scale, inverse;
};

// `largest`: size of the block's largest input, as bits.
PS_INLINE BlockScale block_scale(uint32_t largest) {
  if (largest >= kNoNumber) return {__builtin_nanf(""), 0};
  if (largest < kTiny) return {0, 0};
  return {float_of(largest) / 127.0f, 127.0f / float_of(largest)};
}

// One block of a multiple of 32 columns.
template <class D>
void quantize_block(const typename D::Value* x, long columns, int8_t* values, int16_t* sums, float* scales) {
  I16 most = splat_int(0);
  for (long c = 0; c < columns; c += 16) {  // sizes of floats are ordered as their bits are
    const I16 size = bits_as<I16>(bits_as<U16>(load_inputs<D>(x + c)) & splat_word(0x7FFFFFFFu));
    PS_EACH_PART most.part[i] = most.part[i] < size.part[i] ? size.part[i] : most.part[i];
  }
  alignas(64) uint32_t lanes[16];
  store(lanes, most);
  uint32_t largest = 0;
  for (const uint32_t lane : lanes) largest = lane > largest ? lane : largest;
  const BlockScale own = block_scale(largest);
  const F16 inverse = splat(own.inverse), rounding = splat(kRounding);
  for (long c = 0; c < columns; c += 16) {
    const I16 rounded = bits_as<I16>(load_inputs<D>(x + c) * inverse + rounding) - bits_as<I16>(rounding);
    alignas(64) int32_t wide[16];
    store(wide, rounded);
    int sum = 0;
    for (int lane = 0; lane < 16; ++lane) {
      const auto value = static_cast<int8_t>(own.inverse == 0 ? 0 : wide[lane]);
      values[c + lane] = value;
      sum += value;
    }
    sums[c / kSumColumns] = static_cast<int16_t>(sum);
  }
  for (long c = 0; c < columns; c += kUnitColumns) scales[c / kUnitColumns] = own.scale;
}

// One row, in the order of the weight's columns.
template <class D>
void quantize_row(const QuantView& weight, const typename D::Value* x, const Int8Rows& rows, long row, long block) {
  using Value = typename D::Value;
  const PackedView& w = weight.layout;
  for (int s = 0; s < w.segments; ++s)
    for (long column = w.k_begin[s], next; column < w.k_begin[s + 1]; column = next) {
      next = min_of(w.k_begin[s + 1], (column / block + 1) * block);
      Value ordered[kSuperColumns];
      const Value* own = x + column;
      if (weight.order != nullptr) {
        for (long c = column; c < next; ++c) ordered[c - column] = x[weight.order[c]];
        own = ordered;
      }
      quantize_block<D>(own, next - column, rows.values(row) + column, rows.sums(row) + column / kSumColumns,
                        rows.scales(row) + column / kUnitColumns);
    }
}

}  // namespace
