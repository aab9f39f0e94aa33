// x W^T over quantised weights, and rows of a quantised table.
//
// Inside a piece of 32 columns (16 where a scale spans no more) products of codes' values are summed from zero, in the
// order of the family's plain product; the piece's sum is multiplied by its scale and added to the output's, then its
// minimum times the sum of its inputs.  Pieces follow one another from low to high within a segment, segments join as in
// gemm.hpp.  So a row's bits are its own, whether codes are decoded in registers (few rows) or into a slab (more rows).
#pragma once

#include "gemm.hpp"
#include "quantised_decode.hpp"

namespace {

constexpr long kSlabUnits = 32;
constexpr long kRegisterUnits = 8;  // between two looks at the records
constexpr int kMaxCodedRows = 8;
constexpr int coded_panels(int rows) { return rows <= 4 ? 4 : 2; }
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
  PS_INLINE Chunk load(int panel, long unit, long cell) const {
    return {cells + ((panel * kSlabUnits + unit) * kUnitCells + cell) * 16};
  }
  PS_INLINE U16 cell(const Chunk& chunk, int cell) const { return load_as<U16>(chunk.cells + cell % 4 * 16); }
  PS_INLINE void fetch(int, long) const {}
};

// Where codes are decoded in registers: with the compute type bf16, on processors with VBMI.  A tile for every format
// and number of rows is a lot of code, so it is spared where decode would gain least.
#if defined(__AVX512VBMI__)
// Cells that are decoded when they are asked for.
template <int kBits>
struct CodeSource {
  using Own = Decoder<kBits>;
  using Chunk = typename Own::Chunk;
  static constexpr int kChunk = Own::kChunk;
  static constexpr long kAheadUnits = kFetchBytes / (64 * kBits);
  Own decoder;
  const Span& span;
  const uint8_t* codes;

  explicit PS_INLINE CodeSource(const QuantTile& tile)
      : decoder(tile.span.part->values), span(tile.span), codes(span.part->unit(span.panel, span.unit)) {}
  PS_INLINE const uint8_t* unit_of(int panel, long unit) const {
    return codes + panel * span.part->panel_bytes() + unit * 64 * kBits;
  }
  PS_INLINE Chunk load(int panel, long unit, long cell) const { return decoder.load(unit_of(panel, unit), cell); }
  PS_INLINE U16 cell(const Chunk& chunk, int cell) const { return decoder.cell(chunk, cell); }
  // Asks for what is multiplied some units later: of this panel, or behind its end of the one in the next group.
  PS_INLINE void fetch(int panel, long unit) const {
    const long ahead = span.unit + unit + kAheadUnits;
    const long jump = ahead < span.part->units ? 0 : (span.panels - 1) * span.part->panel_bytes();
    const uint8_t* from = unit_of(panel, unit + kAheadUnits) + jump;
    _Pragma("GCC unroll 8") for (int line = 0; line < kBits; ++line) __builtin_prefetch(from + line * 64, 0, 3);
  }
};
#endif

template <class D>
PS_INLINE F16 dot_values(const F16& sum, const U16& cells, const char* x, size_t x_step) {
  if constexpr (D::kPerCell == 2) return dot_cells<D>(sum, cells, load_cell(x));
  const F16 early = fma16(low_half(cells), bits_as<F16>(splat_word(load_cell(x))), sum);
  return fma16(high_half(cells), bits_as<F16>(splat_word(load_cell(x + x_step))), early);
}

// acc += units . x; a piece has kPiece cells.
template <class D, class Source, int kPiece, int M, int P>
__attribute__((noinline)) void quant_tile(const QuantTile& tile) {
  constexpr size_t kValues = 2 / D::kPerCell;  // steps of x in a cell
  const Source source(tile);
  const size_t x_stride = tile.x_stride, x_step = tile.x_step;
  const char* x = tile.x;
  long piece = 0;
  for (long unit = 0; unit < tile.span.units; ++unit) {
    PS_PANELS source.fetch(p, unit);
    for (int begin = 0; begin < kUnitCells; begin += kPiece, ++piece) {
      F16 part[M][P];
      PS_ROWS PS_PANELS part[m][p] = splat(0.0f);
      _Pragma("GCC unroll 8") for (int c = 0; c < kPiece; c += Source::kChunk) {
        typename Source::Chunk chunk[P];
        PS_PANELS chunk[p] = source.load(p, unit, begin + c);
        _Pragma("GCC unroll 4") for (int j = 0; j < Source::kChunk; ++j, x += kValues * x_step) {
          U16 cells[P];
          PS_PANELS cells[p] = source.cell(chunk[p], c + j);  // a piece of 8 cells looks like the first
          PS_ROWS PS_PANELS part[m][p] = dot_values<D>(part[m][p], cells[p], x + m * x_stride, x_step);
        }
      }
      PS_ROWS PS_PANELS {
        float* to = tile.acc + (m * P + p) * 16;
        F16 sum = fma16(load(tile.scales + (p * tile.span.pieces + piece) * 16), part[m][p], load(to));
        if (tile.mins != nullptr) {
          const F16 min = load(tile.mins + (p * tile.span.pieces + piece) * 16);
          sum = fma16(min, splat(tile.sums[unit * tile.sums_stride + m]), sum);
        }
        store(to, sum);
      }
    }
  }
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

// Null where codes of this part are not decoded in registers.
template <class D>
QuantTileFn pick_coded_tile([[maybe_unused]] const QuantPart& part, [[maybe_unused]] int rows,
                            [[maybe_unused]] int panels) {
#if defined(__AVX512VBMI__)
#define PS_CODED(bits, piece)                                                   \
  (panels == 4   ? pick_quant_rows<D, CodeSource<bits>, piece, 4, 4>(rows)      \
   : panels == 2 ? pick_quant_rows<D, CodeSource<bits>, piece, 2, kMaxCodedRows>(rows) \
                 : nullptr)
  if constexpr (D::kPerCell == 2) {
    if (part.bits == 6 && part.group == 16) return PS_CODED(6, 8);
    if (part.group == 16) return nullptr;
    if (part.bits == 4) return PS_CODED(4, 16);
    if (part.bits == 5) return PS_CODED(5, 16);
    if (part.bits == 8) return PS_CODED(8, 16);
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

// One call's operands.
template <class D>
struct QuantCall {
  QuantView weight;
  LinearArgs plain;  // the same for what does not look at weights
  RowCut cut;
  Inputs x;
  const float* sums;  // null, or [units][rows]

  static constexpr long kMostPanels = kCodedPanels > kDecodedPanels ? kCodedPanels : kDecodedPanels;
  static constexpr long kCells = kDecodedPanels * kSlabUnits * kUnitCells * 16;
  static constexpr long kNumbers = kMostPanels * kSlabUnits * 2 * 16;  // scales or minimums of a span

  // Scratch of one item: numbers, decoded cells, then the sums.
  size_t scratch_bytes() const {
    const long rows = min_of(plain.rows, kRowBlock);
    return static_cast<size_t>(2 * kNumbers + kCells + kSlots * rows * kMostPanels * 16) * 4;
  }

  // The tile that decodes in registers; null where there is none.
  QuantTileFn coded_tile(const QuantPart& part, int panels) const {
    return plain.rows <= kMaxCodedRows ? pick_coded_tile<D>(part, static_cast<int>(plain.rows), panels) : nullptr;
  }
  int most_panels() const { return plain.rows <= kMaxCodedRows ? coded_panels(static_cast<int>(plain.rows)) : kDecodedPanels; }

  const QuantPart& part_of(long panel) const {
    const QuantPart* part = weight.parts;
    while (panel >= part->first_panel + part->panels) ++part;
    return *part;
  }

  // As many panels from `panel` on as are multiplied at once, all in one part.
  int panels_at(long panel, long end) const {
    const QuantPart& part = part_of(panel);
    const int own = most_panels(), wide = coded_tile(part, own) != nullptr ? own : kDecodedPanels;
    return panel + wide <= min_of(end, part.first_panel + part.panels) ? wide : 1;
  }

  // The tiles of a block's rows times one span; `to` [rows of the block][panels * 16].
  void multiply(Span span, const BlockTiles& tiles, float* scratch, float* to) const {
    const QuantPart& part = *span.part;
    const long columns = part.group == 16 ? 16 : kUnitColumns;
    span.pieces = span.units * kUnitColumns / columns;
    float *scales = scratch, *mins = part.min == MinKind::kNone ? nullptr : scratch + kNumbers;
    uint32_t* cells = reinterpret_cast<uint32_t*>(scratch + 2 * kNumbers);
    const QuantTileFn coded = coded_tile(part, span.panels);
    for (int p = 0; p < span.panels; ++p) {
      const long own = p * span.pieces * 16;
      expand_numbers(part, span.panel + p, span.unit, span.pieces, columns, scales + own, mins == nullptr ? mins : mins + own);
      if (coded == nullptr) decode(span, p, cells + p * kSlabUnits * kUnitCells * 16);
    }
    QuantTile tile{span, cells, scales, mins, nullptr, plain.rows, nullptr, 0, 0, nullptr};
    for (long t = 0; t < tiles.count; ++t) {
      const long row = tiles.begin[t];
      const int rows = tiles.rows_of(t);
      TileArgs place;
      x.place(place, row, rows, span.unit * kUnitColumns / D::kPerCell);
      tile.x = place.x;
      tile.x_stride = place.x_stride;
      tile.x_step = place.x_step;
      tile.sums = sums == nullptr ? nullptr : sums + span.unit * plain.rows + row;
      tile.acc = to + (row - tiles.first()) * span.panels * 16;
      if (coded != nullptr) {
        coded(tile);
      } else {
        (columns == 16 ? pick_slab_tile<D, 8> : pick_slab_tile<D, 16>)(rows, span.panels)(tile);
      }
    }
  }

  static void decode(const Span& span, int p, uint32_t* cells) {
    switch (span.part->bits) {
      case 4: return decode_units<4>(*span.part, span.panel + p, span.unit, span.units, cells);
      case 5: return decode_units<5>(*span.part, span.panel + p, span.unit, span.units, cells);
      case 6: return decode_units<6>(*span.part, span.panel + p, span.unit, span.units, cells);
      default: return decode_units<8>(*span.part, span.panel + p, span.unit, span.units, cells);
    }
  }

  // The sums of all rows of a block for a group of panels of one part, in the first slot.
  void sum_group(const PanelGroup& group, const BlockTiles& tiles, float* scratch, float* slots) const {
    const PackedView& w = weight.layout;
    const QuantPart& part = part_of(group.panel);
    const long panel = group.panel - part.first_panel;
    const long most = coded_tile(part, group.panels) != nullptr ? kRegisterUnits : kSlabUnits;
    const Sums slot{slots, tiles.rows() * group.panels * 16};
    for (int s = 0; s < w.segments; ++s) {
      float* own = slot.of(s);
      for (long i = 0; i < slot.slot_floats; i += 16) store(own + i, splat(0.0f));
      const long end = w.k_begin[s + 1] / kUnitColumns;
      for (long unit = w.k_begin[s] / kUnitColumns; unit < end; unit += most)
        multiply({&part, panel, group.panels, unit, min_of(most, end - unit), 0}, tiles, scratch, own);
      slot.close(s);
    }
  }

  // Panels [panel, end), of a gate each with its counterpart.
  void run(long panel, long end, long block, float* scratch) const {
    const BlockTiles tiles(cut, block);
    const long other = plain.gate == nullptr ? 0 : panels_to_cut(plain);
    const auto at_once = [&](long from) {
      const int own = panels_at(from, end), also = other == 0 ? own : panels_at(from + other, end + other);
      return own == also ? own : 1;
    };
    const auto sum = [&](const PanelGroup& group, float* slots) { sum_group(group, tiles, scratch, slots); };
    each_group<D>(plain, panel, end, at_once, tiles.first(), tiles.rows(), scratch + 2 * kNumbers + kCells, sum);
  }
};

inline bool any_min(const QuantView& w) {
  for (long i = 0; i < w.count; ++i)
    if (w.parts[i].min != MinKind::kNone) return true;
  return false;
}

// What of the call does not look at weights: inputs are read by units, whatever a cell holds.
template <class D>
PS_INLINE LinearArgs as_plain(const QuantLinearArgs& args) {
  LinearArgs plain{args.x,    args.rows,   args.weight.layout, args.out,  args.add,
                   args.picks, args.stored, args.form,          args.gate, args.gated};
  if (D::kPerCell == 1)
    for (int s = 0; s <= plain.weight.segments; ++s) plain.weight.step_begin[s] = plain.weight.k_begin[s];
  plain.weight.per_cell = D::kPerCell;
  return plain;
}

// Sums of every 32 inputs, [units][rows].
template <class D>
void sum_inputs(const LinearArgs& args, float* sums) {
  const long units = args.weight.k / kUnitColumns, row_bytes = packed_row_bytes(args.weight);
  each_item(args.rows, static_cast<double>(args.rows * args.weight.k), [&](long row, int) {
    const char* from = static_cast<const char*>(args.x) + row * row_bytes;
    for (long u = 0; u < units; ++u) sums[u * args.rows + row] = sum_unit<D>(from + u * kUnitColumns * 4 / D::kPerCell);
  });
}

template <class D>
void linear_quantised(const QuantLinearArgs& args) {
  if (args.rows == 0) return;
  const LinearArgs plain = as_plain<D>(args);
  const PackedView& w = plain.weight;
  const RowCut cut{args.rows};
  const bool packs = args.rows > kMaxRows, adds = any_min(args.weight);
  const size_t packed_bytes = packs ? args.rows * packed_row_bytes(w) : 0;
  const size_t sums_bytes = adds ? static_cast<size_t>(args.rows * w.k / kUnitColumns) * 4 : 0;
  char* shared = packs || adds ? static_cast<char*>(shared_workspace(packed_bytes + sums_bytes)) : nullptr;
  float* sums = adds ? reinterpret_cast<float*>(shared + packed_bytes) : nullptr;
  if (adds) sum_inputs<D>(plain, sums);
  const Inputs x = packs ? pack_all_inputs<D>(plain, cut, shared) : given_inputs(plain);
  const QuantCall<D> call{args.weight, plain, cut, x, sums};
  const long panels = panels_to_cut(plain);
  const double work = product_work(args.rows, w);
  const long each = panels_an_item(panels, call.most_panels(), work / static_cast<double>(cut.blocks()));
  const long groups = (panels + each - 1) / each;
  each_item(groups * cut.blocks(), work, [&](long item, int worker) {
    const long panel = item % groups * each;
    float* scratch = static_cast<float*>(workspace(worker, call.scratch_bytes()));
    call.run(panel, min_of(panels, panel + each), item / groups, scratch);
  });
}

// Rows of the table: each weight in fp32, scale times value plus minimum.
inline void embed_quantised(const QuantEmbedArgs& args) {
  const long k = args.table.layout.k, units = k / kUnitColumns;
  each_item(args.rows, static_cast<double>(args.rows) * static_cast<double>(k) * 8, [&](long row, int) {
    const long panel = args.tokens[row] / 16;
    const int lane = static_cast<int>(args.tokens[row] % 16);
    const QuantPart* part = args.table.parts;
    while (panel >= part->first_panel + part->panels) ++part;
    float* to = args.out + row * k;
    const long columns = part->group == 16 ? 16 : kUnitColumns;
    for (long unit = 0; unit < units; ++unit) {
      float scales[32], mins[32];
      const bool adds = part->min != MinKind::kNone;
      expand_numbers(*part, panel - part->first_panel, unit, kUnitColumns / columns, columns, scales, adds ? mins : nullptr);
      const uint8_t* codes = part->unit(panel - part->first_panel, unit);
      for (long c = 0; c < kUnitColumns; ++c) {
        const long piece = c / columns * 16 + lane;
        const float value = bf16_to_float(part->values[code_at(codes, part->bits, c / 2, lane, static_cast<int>(c % 2))]);
        const float product = scales[piece] * value;
        to[unit * kUnitColumns + c] = adds ? product + mins[piece] : product;
      }
    }
  });
}

}  // namespace
