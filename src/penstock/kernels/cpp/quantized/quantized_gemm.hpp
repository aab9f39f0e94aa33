// x W^T over quantized weights, and rows of a quantized table.
//
// Pieces of 32 columns (quantized/quantized_tile.hpp) follow one another from low to high within a segment, segments join as in
// gemm/gemm.hpp.  So a row's bits are its own, whether codes are decoded in registers (few rows) or into a slab (more rows).
// Where columns have an order of their own, inputs are put into it first.
#pragma once

#include "quantized/int8_codes.hpp"
#include "quantized/quantized_tile.hpp"

namespace {

// One call's operands; what is multiplied in which order follows from `cut` alone.
template <class D>
struct QuantCall {
  QuantView weight;
  LinearArgs plain;  // the same for what does not look at weights
  RowCut cut;
  Inputs x;
  float* sums;  // null, or [units][rows]
  long each;    // panels of an item

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
      fetch_numbers(span, p);
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

  // Asks for the numbers of the span behind this one: of this panel, or behind its end of the one in the next group.
  static void fetch_numbers(const Span& span, int p) {
    const QuantPart& part = *span.part;
    const long columns = part.record_columns(), next = span.unit + span.units;
    const long from = span.unit * kUnitColumns / columns, to = (next * kUnitColumns + columns - 1) / columns;
    const long jump = next < part.units ? 0 : (span.panels - 1) * part.records() * part.record_bytes();
    const uint8_t* behind = part.record(span.panel + p, to) + jump;
    for (long byte = 0; byte < (to - from) * part.record_bytes(); byte += 64) __builtin_prefetch(behind + byte, 0, 3);
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

  long groups() const { return (panels_to_cut(plain) + each - 1) / each; }
  long items() const { return groups() * cut.blocks(); }

  // Some panels for the rows of a block, of a gate each with its counterpart.
  void run(long item, int worker) const {
    const long panel = item % groups() * each, end = min_of(panels_to_cut(plain), panel + each), block = item / groups();
    float* scratch = static_cast<float*>(workspace(worker, scratch_bytes()));
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
PS_INLINE LinearArgs by_units(const QuantLinearArgs& args) {
  LinearArgs plain = as_plain(args);
  if (D::kPerCell == 1)
    for (int s = 0; s <= plain.weight.segments; ++s) plain.weight.step_begin[s] = plain.weight.k_begin[s];
  plain.weight.per_cell = D::kPerCell;
  return plain;
}

// Memory of one call: inputs in the order of the weight's columns, then as tiles, then sums of every 32.
struct QuantRoom {
  size_t ordered, packed, sums;

  explicit QuantRoom(const QuantLinearArgs& args, const LinearArgs& plain) {
    const size_t x_bytes = args.rows * packed_row_bytes(plain.weight);
    ordered = args.weight.order == nullptr ? 0 : whole_lines(x_bytes);
    packed = args.rows > kMaxRows ? whole_lines(x_bytes) : 0;
    sums = any_min(args.weight) ? whole_lines(static_cast<size_t>(args.rows * plain.weight.k / kUnitColumns) * 4) : 0;
  }
  static size_t whole_lines(size_t bytes) { return (bytes + 63) / 64 * 64; }
  size_t all() const { return ordered + packed + sums; }
};

// The call over `memory`, of which `prepare_row` and packing fill what is not there yet.
template <class D>
QuantCall<D> quant_call(const QuantLinearArgs& args, char* memory) {
  LinearArgs plain = by_units<D>(args);
  const QuantRoom room(args, plain);
  if (room.ordered > 0) plain.x = memory;
  char *packed = memory + room.ordered, *sums = packed + room.packed;
  const Inputs x = room.packed > 0 ? Inputs{packed, true, packed_row_bytes(plain.weight)} : given_inputs(plain);
  return {args.weight, plain, RowCut{args.rows}, x, room.sums > 0 ? reinterpret_cast<float*>(sums) : nullptr, 0};
}

// A row's inputs in the order of the weight's columns, and the sums of every 32 of them.
template <class D>
void prepare_row(const QuantCall<D>& call, const void* given, long row) {
  using Value = typename D::Value;
  const long k = call.plain.weight.k;
  char* own = static_cast<char*>(const_cast<void*>(call.plain.x)) + row * packed_row_bytes(call.plain.weight);
  if (call.weight.order != nullptr) {
    const Value* from = static_cast<const Value*>(given) + row * k;
    Value* to = reinterpret_cast<Value*>(own);
    for (long i = 0; i < k; ++i) to[i] = from[call.weight.order[i]];
  }
  if (call.sums == nullptr) return;
  for (long u = 0; u < k / kUnitColumns; ++u)
    call.sums[u * call.plain.rows + row] = sum_unit<D>(own + u * kUnitColumns * 4 / D::kPerCell);
}

template <class D>
PS_INLINE bool prepares_rows(const QuantCall<D>& call) { return call.weight.order != nullptr || call.sums != nullptr; }

template <class D>
void linear_quantized(const QuantLinearArgs& args) {
  if (args.rows == 0) return;
  const size_t bytes = QuantRoom(args, by_units<D>(args)).all();
  QuantCall<D> call = quant_call<D>(args, bytes == 0 ? nullptr : static_cast<char*>(shared_workspace(bytes)));
  const PackedView& w = call.plain.weight;
  if (prepares_rows(call))
    each_item(args.rows, static_cast<double>(args.rows * w.k), [&](long row, int) { prepare_row(call, args.x, row); });
  if (call.x.packed) pack_all_inputs<D>(call.plain, call.cut, const_cast<char*>(call.x.data));
  const double work = product_work(args.rows, w);
  call.each = panels_an_item(panels_to_cut(call.plain), call.most_panels(), work / static_cast<double>(call.cut.blocks()));
  each_item(call.items(), work, [&](long item, int worker) { call.run(item, worker); });
}

template <class D>
void linear_group_quantized(const QuantGroup& group) {
  double work = 0, prepare_work = 0;
  size_t bytes = 0;
  for (long i = 0; i < group.count; ++i) {
    const LinearArgs plain = by_units<D>(group.calls[i]);
    const size_t own = QuantRoom(group.calls[i], plain).all();
    work += product_work(plain.rows, plain.weight);
    if (own > 0) prepare_work += static_cast<double>(plain.rows * plain.weight.k);
    bytes += own;
  }
  using Calls = CallList<QuantCall<D>>;
  const Calls list(static_cast<char*>(shared_workspace(Calls::bytes(group.count) + bytes)), group.count);
  char* memory = list.behind();
  for (long i = 0; i < group.count; ++i) {
    QuantCall<D>& call = list.calls[i];
    call = quant_call<D>(group.calls[i], memory);
    const double own = product_work(call.plain.rows, call.plain.weight) / static_cast<double>(call.cut.blocks());
    call.each = panels_of_share(panels_to_cut(call.plain), call.most_panels(), own, work);
    memory += QuantRoom(group.calls[i], call.plain).all();
  }
  if (bytes > 0)
    each_item(group.count, prepare_work, [&](long i, int) {
      const QuantCall<D>& call = list.calls[i];
      if (prepares_rows(call))
        for (long row = 0; row < call.plain.rows; ++row) prepare_row(call, group.calls[i].x, row);
      if (!call.x.packed) return;
      for (long block = 0; block < call.cut.blocks(); ++block)
        pack_block<D>(call.plain, call.cut, block, const_cast<char*>(call.x.data));
    });
  list.run(work);
}

// What the code of one weight of a unit stands for.
PS_INLINE float coded_value(const QuantPart& part, const uint8_t* unit, long column, int lane) {
  if (part.integers == nullptr)
    return bf16_to_float(part.values[code_at(unit, part.bits, column / 2, lane, static_cast<int>(column % 2))]);
  const unsigned code = quad_code_at(unit, part.bits, column, lane);
  if (part.integers->kind != CodeKind::kByte) return bf16_to_float(part.values[code]);
  return part.integers->unit * static_cast<float>(static_cast<int8_t>(code) - part.integers->offset);
}

// Rows of the table: each weight in fp32, scale times value plus minimum.
inline void embed_quantized(const QuantEmbedArgs& args) {
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
        const float product = scales[piece] * coded_value(*part, codes, c, lane);
        const long column = unit * kUnitColumns + c, place = args.table.order == nullptr ? column : args.table.order[column];
        to[place] = adds ? product + mins[piece] : product;
      }
    }
  });
}

}  // namespace
