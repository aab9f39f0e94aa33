// Tiles over quantized weights and inputs of 8 bits: some rows times some units of a panel.
//
// Where a scale is a number of its own, products of a group's integers (32 columns at most) are summed exactly; that sum,
// times the scales of weight and input, is added to the output's, then the minimum times the sum of the inputs.  Where
// scales are integers of a super-block, they and the minimums are multiplied as integers, too, and each super-block's sums
// are added to the output's once.
#pragma once

#include "quantized/int8_codes.hpp"
#include "quantized/int8_inputs.hpp"

namespace {

constexpr long kInt8Units = 32;  // of a span
constexpr long kSuperUnits = kSuperColumns / kUnitColumns;
constexpr long kAheadBytes = 2048;  // between asking for codes and using them

// Scales of groups as integers: the formats that models have.
inline bool has_integer_scales(const QuantPart& part) {
  if (part.integers->kind != CodeKind::kLinear) return false;
  if (part.scale == ScaleKind::kU8OfF16 && part.min == MinKind::kU8OfF16)
    return part.group == 32 && part.integers->offset == 0 && part.bits < 6;
  return part.scale == ScaleKind::kI8OfF16 && part.min == MinKind::kNone && part.group == 16 && part.bits == 6;
}

// Units of one panel inside one segment, and the inputs of some rows.
struct Int8Tile {
  const QuantPart* part;
  long panel;  // of the part
  long unit;
  long units;
  const float* scales;  // [pieces][16]; unused with integer scales, as are the minimums
  const float* mins;    // null, or the same
  const int8_t* x;      // of the first row and unit, as are the two below
  const int16_t* sums;
  const float* x_scales;
  size_t row_bytes;
  float* acc;  // [rows][16]
};

template <class Value>
PS_INLINE const Value* of_row(const Value* first, size_t row_bytes, int row) {
  return reinterpret_cast<const Value*>(reinterpret_cast<const char*>(first) + static_cast<size_t>(row) * row_bytes);
}

PS_INLINE void fetch_unit(const uint8_t* unit, long bytes) {
  for (long byte = 0; byte < bytes; byte += 64) __builtin_prefetch(unit + kAheadBytes + byte, 0, 3);
}

#define PS_EACH_ROW _Pragma("GCC unroll 8") for (int m = 0; m < M; ++m)

// One scale for every kPiece columns.
template <class Codes, int kPiece, int M>
__attribute__((noinline)) void int8_tile(const Int8Tile& tile) {
  const QuantPart& part = *tile.part;
  const Codes codes(*part.integers);
  const int32_t offset = whole_offset<Codes>(*part.integers);
  const float step = part.integers->unit;
  const size_t stride = tile.row_bytes;
  const long unit_bytes = part.unit_bytes();
  const uint8_t* unit = part.unit(tile.panel, tile.unit);
  const float *scales = tile.scales, *mins = tile.mins;
  F16 acc[M];
  PS_EACH_ROW acc[m] = load(tile.acc + m * 16);
  for (long u = 0; u < tile.units; ++u, unit += unit_bytes) {
    fetch_unit(unit, unit_bytes);
    const int8_t* x = tile.x + u * kUnitColumns;
    const auto piece = [&]<int kBegin>() __attribute__((always_inline)) {
      int x_sum[M];
      I16 sum[M];
      PS_EACH_ROW {
        const int16_t* own = of_row(tile.sums, stride, m) + u * 2 + kBegin / kSumColumns;
        x_sum[m] = kPiece == 32 ? own[0] + own[1] : own[0];
        sum[m] = splat_int(-offset * x_sum[m]);
      }
      add_products<Codes, kBegin / kQuadInputs, kPiece / kQuadInputs, M>(sum, NoFactor(), codes, unit, x, stride);
      const F16 scale = load(scales);
      PS_EACH_ROW {
        const float x_scale = of_row(tile.x_scales, stride, m)[u];
        acc[m] = fma16(scale * splat(x_scale * step), to_float(sum[m]), acc[m]);
        if (mins != nullptr) acc[m] = fma16(load(mins), splat(x_scale * static_cast<float>(x_sum[m])), acc[m]);
      }
      scales += 16;
      if (mins != nullptr) mins += 16;
    };
    piece.template operator()<0>();
    if constexpr (kPiece == 16) piece.template operator()<16>();
  }
  PS_EACH_ROW store(tile.acc + m * 16, acc[m]);
}

// Integer scales for every kGroup columns; with minimums as integers, or else codes with an offset.
template <class Codes, int kGroup, bool kSigned, bool kMin, int M>
__attribute__((noinline)) void int8_super_tile(const Int8Tile& tile) {
  constexpr int kGroups = kUnitColumns / kGroup;  // of a unit
  const QuantPart& part = *tile.part;
  const Codes codes(*part.integers);
  const float step = part.integers->unit;
  const size_t stride = tile.row_bytes;
  const long unit_bytes = part.unit_bytes();
  const uint8_t* unit = part.unit(tile.panel, tile.unit);
  const long record_bytes = part.record_bytes();
  const uint8_t* record = part.record(tile.panel, tile.unit / kSuperUnits);
  long first = tile.unit % kSuperUnits;  // of the super-block
  F16 acc[M];
  PS_EACH_ROW acc[m] = load(tile.acc + m * 16);
  for (long u = 0; u < tile.units; first = 0, record += record_bytes) {
    const long begin = u, end = min_of(tile.units, u + kSuperUnits - first);
    const uint8_t* scales = record + (kMin ? 64 : 32) + first * kGroups * 16;
    const uint8_t* mins = scales + kSuperUnits * kGroups * 16;
    for (long byte = 0; byte < record_bytes; byte += 64) __builtin_prefetch(record + record_bytes + byte, 0, 3);
    I16 sum[M], low[M];
    PS_EACH_ROW sum[m] = low[m] = splat_int(0);
    for (; u < end; ++u, unit += unit_bytes) {
      fetch_unit(unit, unit_bytes);
      const auto group = [&]<int kIndex>() __attribute__((always_inline)) {
        constexpr int kCount = kGroup / kQuadInputs;
        const ScaleFactor<kSigned> factor(scales);
        add_products<Codes, kIndex * kCount, kCount, M>(sum, factor, codes, unit, tile.x + u * kUnitColumns, stride);
        const I16 lower = kMin ? load_integers(mins, false) : factor.scales;
        PS_EACH_ROW {
          const int16_t* own = of_row(tile.sums, stride, m) + u * 2 + kIndex;
          low[m] = low[m] + times(lower, kGroup == 32 ? own[0] + own[1] : own[0]);
        }
        scales += 16, mins += 16;
      };
      group.template operator()<0>();
      if constexpr (kGroups == 2) group.template operator()<1>();
    }
    const F16 super = load_halves(record);
    PS_EACH_ROW {
      const float x_scale = of_row(tile.x_scales, stride, m)[begin];
      if constexpr (!kMin) {
        const int32_t offset = part.integers->offset;
        PS_EACH_PART sum[m].part[i] -= low[m].part[i] * offset;
      }
      acc[m] = fma16(super * splat(x_scale * step), to_float(sum[m]), acc[m]);
      if constexpr (kMin) acc[m] = fma16(negative(load_halves(record + 32)) * splat(x_scale), to_float(low[m]), acc[m]);
    }
  }
  PS_EACH_ROW store(tile.acc + m * 16, acc[m]);
}

using Int8TileFn = void (*)(const Int8Tile&);

template <int M>
Int8TileFn pick_int8_rows(const QuantPart& part) {
  if (has_integer_scales(part)) {
    if (part.bits == 4) return int8_super_tile<LinearCodes<4>, 32, false, true, M>;
    if (part.bits == 5) return int8_super_tile<LinearCodes<5>, 32, false, true, M>;
    return int8_super_tile<LinearCodes<6>, 16, true, false, M>;
  }
#define PS_PIECES(Codes) (part.group == 16 ? int8_tile<Codes, 16, M> : int8_tile<Codes, 32, M>)
  switch (part.integers->kind) {
    case CodeKind::kByte: return PS_PIECES(ByteCodes);
    case CodeKind::kTable: return PS_PIECES(TableCodes);
    default: return part.bits == 4 ? PS_PIECES(LinearCodes<4>) : part.bits == 5 ? PS_PIECES(LinearCodes<5>) : PS_PIECES(LinearCodes<6>);
  }
#undef PS_PIECES
}

// A tile for as many of `rows` as there is one for, and their number.
struct Int8Rule {
  Int8TileFn tile;
  int rows;
};

PS_INLINE Int8Rule pick_int8_tile(const QuantPart& part, long rows) {
  if constexpr (kMaxRows >= 8)
    if (rows >= 8) return {pick_int8_rows<8>(part), 8};
  if constexpr (kMaxRows >= 4)
    if (rows >= 4) return {pick_int8_rows<4>(part), 4};
  if (rows >= 2) return {pick_int8_rows<2>(part), 2};
  return {pick_int8_rows<1>(part), 1};
}

#undef PS_EACH_ROW

}  // namespace
