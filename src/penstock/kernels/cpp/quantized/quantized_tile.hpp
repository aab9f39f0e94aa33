// Tiles over quantized weights: some rows times some units of some panels, codes decoded in registers or into a slab.
//
// Inside a piece of 32 columns (16 where a scale spans no more) products of codes' values are summed from zero, in the
// order of the family's plain product; the piece's sum is multiplied by its scale and added to the output's, then its
// minimum times the sum of its inputs.
#pragma once

#include <type_traits>

#include "gemm/gemm.hpp"
#include "quantized/quantized_decode.hpp"

namespace {

constexpr long kSlabUnits = 32;
constexpr long kRegisterUnits = 8;  // between two looks at the records
#if defined(__AVX512F__)
constexpr int kMaxCodedRows = 8;
constexpr int coded_panels(int rows) { return rows <= 4 ? 4 : 2; }  // more are faster in a cache, slower from memory
#else
constexpr int kMaxCodedRows = 1;
constexpr int coded_panels(int) { return 2; }  // more do not fit the registers
#endif
constexpr int kCodedPanels = coded_panels(1);
constexpr long kFetchBytes = 2048;  // of one panel, between asking for codes and using them

// Some units of some panels of one part, inside one segment.
struct Span {
  const QuantPart* part;
  long panel;  // of the part
  int panels;
  long unit;
  long units;
  long pieces;  // of all units of one panel
};

// One tile: its rows' inputs (as TileArgs has them), numbers of its pieces, and the sums that grow.
struct QuantTile {
  Span span;
  const uint32_t* cells;  // null, or decoded: [panels][kSlabUnits * 16][16]
  const float* scales;    // [panels][pieces][16]
  const float* mins;      // null, or the same
  const float* sums;      // [units][rows of the call]: of this tile's first row
  long sums_stride;
  const char* x;
  size_t x_stride;
  size_t x_step;
  float* acc;  // [rows][panels * 16]
};

// Cells that lie decoded.
struct SlabSource {
  static constexpr int kChunk = 4;
  struct Chunk {
    const uint32_t* cells;
  };
  const uint32_t* cells;

  explicit PS_INLINE SlabSource(const QuantTile& tile) : cells(tile.cells) {}
  PS_INLINE Chunk load(int panel, long unit, long cell, long) const {
    return {cells + ((panel * kSlabUnits + unit) * kUnitCells + cell) * 16};
  }
  PS_INLINE U16 cell(const Chunk& chunk, int cell) const { return load_as<U16>(chunk.cells + cell % 4 * 16); }
  PS_INLINE long ahead(long) const { return 0; }
  PS_INLINE void fetch(int, long, long) const {}
};

// Cells that are decoded when they are asked for.
template <int kBits, class Own>
struct CodeSource {
  using Chunk = typename Own::Chunk;
  static constexpr int kChunk = Own::kChunk;
  static constexpr long kAheadUnits = kFetchBytes / (64 * kBits);
  Own decoder;
  const Span& span;
  const uint8_t* codes;

  explicit PS_INLINE CodeSource(const QuantTile& tile)
      : decoder(*tile.span.part), span(tile.span), codes(span.part->unit(span.panel, span.unit)) {}
  PS_INLINE const uint8_t* unit_of(int panel, long unit) const {
    return codes + panel * span.part->panel_bytes() + unit * 64 * kBits;
  }
  // With each line that is read, the one that is multiplied some units later is asked for, `ahead` bytes behind it.
  PS_INLINE Chunk load(int panel, long unit, long cell, long ahead) const {
    const uint8_t* own = unit_of(panel, unit);
    __builtin_prefetch(own + cell / Own::kChunk * 64 + ahead, 0, 3);
    return decoder.load(own, cell);
  }
  PS_INLINE auto cell(const Chunk& chunk, int cell) const { return decoder.cell(chunk, cell); }
  // Of this panel, or behind its end of the one in the next group.
  PS_INLINE long ahead(long unit) const {
    const long jump = span.unit + unit + kAheadUnits < span.part->units ? 0 : (span.panels - 1) * span.part->panel_bytes();
    return kAheadUnits * 64 * kBits + jump;
  }
  // Lines of bits beyond four, which several loads read.
  PS_INLINE void fetch(int panel, long unit, long ahead) const {
    if constexpr (kBits == 5 || kBits == 6)
      _Pragma("GCC unroll 2") for (int line = 4; line < kBits; ++line)
          __builtin_prefetch(unit_of(panel, unit) + line * 64 + ahead, 0, 3);
  }
};

template <class D>
PS_INLINE F16 dot_values(const F16& sum, const U16& cells, const char* x, size_t x_step) {
  if constexpr (D::kPerCell == 2) return dot_cells<D>(sum, cells, load_cell(x));
  const F16 early = fma16(low_half(cells), bits_as<F16>(splat_word(load_cell(x))), sum);
  return fma16(high_half(cells), bits_as<F16>(splat_word(load_cell(x + x_step))), early);
}

template <class D>
PS_INLINE F16 dot_values(const F16& sum, const CellValues& cell, const char* x, size_t x_step) {
  static_assert(D::kPerCell == 1);
  const F16 early = fma16(cell.early, bits_as<F16>(splat_word(load_cell(x))), sum);
  return fma16(cell.late, bits_as<F16>(splat_word(load_cell(x + x_step))), early);
}

// Computed here and not later: left alone, the compiler sums one panel after the other, and each waits for itself.
PS_INLINE void keep_in_order(F16& sum) { PS_EACH_PART asm volatile("" : "+x"(sum.part[i])); }

// A single row's bf16 inputs as floats, so that a load gives one to all lanes; the products are the same.
struct WideInputs {
  alignas(64) float values[kSlabUnits * kUnitColumns];

  explicit PS_INLINE WideInputs(const QuantTile& tile) {
    const auto* from = reinterpret_cast<const uint16_t*>(tile.x);
    for (long u = 0; u < tile.span.units; ++u)
      for (long i = u * kUnitColumns; i < (u + 1) * kUnitColumns; ++i) values[i] = bf16_to_float(from[i]);
  }
};
struct GivenInputs {
  explicit PS_INLINE GivenInputs(const QuantTile&) {}
};

// acc += units . x; a piece has kPiece cells.
template <class D, class Source, int kPiece, int M, int P>
__attribute__((noinline)) void quant_tile(const QuantTile& tile) {
  constexpr bool kWiden = kWidensInputs && M == 1 && D::kPerCell == 2;
  using Dot = std::conditional_t<kWiden, Fp32, D>;
  constexpr size_t kValues = 2 / Dot::kPerCell;  // steps of x in a cell
  const Source source(tile);
  const size_t x_stride = tile.x_stride, x_step = M == 1 ? 4 : tile.x_step;  // a row's cells lie side by side
  const std::conditional_t<kWiden, WideInputs, GivenInputs> inputs(tile);
  const char* x = tile.x;
  if constexpr (kWiden) x = reinterpret_cast<const char*>(inputs.values);
  long piece = 0;
  F16 grown[M == 1 ? P : 1];
  if constexpr (M == 1) PS_PANELS grown[p] = load(tile.acc + p * 16);
  for (long unit = 0; unit < tile.span.units; ++unit) {
    const long ahead = source.ahead(unit);
    PS_PANELS source.fetch(p, unit, ahead);
    for (int begin = 0; begin < kUnitCells; begin += kPiece, ++piece) {
      F16 part[M][P];
      PS_ROWS PS_PANELS part[m][p] = splat(0.0f);
      _Pragma("GCC unroll 8") for (int c = 0; c < kPiece; c += Source::kChunk) {
        if constexpr (M == 1 && !kWidensInputs) {  // one panel after the other: few registers hold codes, many hold sums
          PS_PANELS {
            const typename Source::Chunk chunk = source.load(p, unit, begin + c, ahead);
            _Pragma("GCC unroll 4") for (int j = 0; j < Source::kChunk; ++j)
                part[0][p] = dot_values<Dot>(part[0][p], source.cell(chunk, c + j), x + j * kValues * x_step, x_step);
          }
          x += Source::kChunk * kValues * x_step;
          continue;
        }
        typename Source::Chunk chunk[P];
        PS_PANELS chunk[p] = source.load(p, unit, begin + c, ahead);
        _Pragma("GCC unroll 4") for (int j = 0; j < Source::kChunk; ++j, x += kValues * x_step) {
          decltype(source.cell(chunk[0], 0)) cells[P];
          PS_PANELS cells[p] = source.cell(chunk[p], c + j);  // a piece of 8 cells looks like the first
          PS_ROWS PS_PANELS part[m][p] = dot_values<Dot>(part[m][p], cells[p], x + m * x_stride, x_step);
          if constexpr (kWiden) PS_PANELS keep_in_order(part[0][p]);
        }
      }
      PS_ROWS PS_PANELS {
        float* to = tile.acc + (m * P + p) * 16;
        const F16 before = M == 1 ? grown[M == 1 ? p : 0] : load(to);
        F16 sum = fma16(load(tile.scales + (p * tile.span.pieces + piece) * 16), part[m][p], before);
        if (tile.mins != nullptr) {
          const F16 min = load(tile.mins + (p * tile.span.pieces + piece) * 16);
          sum = fma16(min, splat(tile.sums[unit * tile.sums_stride + m]), sum);
        }
        if constexpr (M == 1) grown[p] = sum;
        if constexpr (M > 1) store(to, sum);
      }
    }
  }
  if constexpr (M == 1) PS_PANELS store(tile.acc + p * 16, grown[p]);
}

using QuantTileFn = void (*)(const QuantTile&);

template <class D, class Source, int kPiece, int P, int M>
QuantTileFn pick_quant_rows(int rows) {
  if (rows == M) return quant_tile<D, Source, kPiece, M, P>;
  if constexpr (M > 1) return pick_quant_rows<D, Source, kPiece, P, M - 1>(rows);
  return nullptr;
}

constexpr int kDecodedPanels = panels_at_once(kMaxRows);

template <class D, int kPiece>
QuantTileFn pick_slab_tile(int rows, int panels) {
  if (panels == kDecodedPanels) return pick_quant_rows<D, SlabSource, kPiece, kDecodedPanels, kMaxRows>(rows);
  return pick_quant_rows<D, SlabSource, kPiece, 1, kMaxRows>(rows);
}

// Null where codes of this part are decoded into a slab.  Registers serve the compute type bf16: on processors with VBMI,
// and single rows with AVX2.  A tile for every format and number of rows is a lot of code, so it is spared where decode
// would gain least.
template <class D>
QuantTileFn pick_coded_tile([[maybe_unused]] const QuantPart& part, [[maybe_unused]] int rows,
                            [[maybe_unused]] int panels) {
#if defined(__AVX512VBMI__)
#define PS_CODED(bits, piece)                                                   \
  (panels == 4   ? pick_quant_rows<D, CodeSource<bits, Decoder<bits>>, piece, 4, 4>(rows)      \
   : panels == 2 ? pick_quant_rows<D, CodeSource<bits, Decoder<bits>>, piece, 2, kMaxCodedRows>(rows) \
                 : nullptr)
  if constexpr (D::kPerCell == 2) {
    if (part.bits == 6 && part.group == 16) return PS_CODED(6, 8);
    if (part.group == 16) return nullptr;
    if (part.bits == 4) return PS_CODED(4, 16);
    if (part.bits == 5) return PS_CODED(5, 16);
    if (part.bits == 8) return PS_CODED(8, 16);
  }
#undef PS_CODED
#elif defined(__AVX2__) && !defined(__AVX512F__)
#define PS_CODED(decoder, bits, piece) quant_tile<D, CodeSource<bits, decoder<bits>>, piece, 1, kCodedPanels>
  if constexpr (D::kPerCell == 2) {
    if (rows != 1 || panels != kCodedPanels) return nullptr;
    if (part.bits == 6 && part.group == 16 && part.zero_code >= 0) return PS_CODED(IntegerDecoder, 6, 8);
    if (part.group == 16) return nullptr;
    if (part.bits == 4) return PS_CODED(Decoder, 4, 16);
    if (part.bits == 5) return PS_CODED(Decoder, 5, 16);
    if (part.bits == 8 && part.zero_code >= 0) return PS_CODED(IntegerDecoder, 8, 16);
  }
#undef PS_CODED
#endif
  return nullptr;
}

// Sum of 32 values: even and odd columns' first, then across lanes.
template <class D>
PS_INLINE float sum_unit(const void* x) {
  if constexpr (D::kPerCell == 2) {
    const U16 cells = load_as<U16>(x);
    return sum_lanes(low_half(cells) + high_half(cells));
  }
  const float* values = static_cast<const float*>(x);
  return sum_lanes(load(values) + load(values + 16));
}

}  // namespace
