// x W^T over quantized weights, with inputs quantized to 8 bits as llama.cpp quantizes them.
//
// Rows are quantized once a call (quantized/int8_inputs.hpp); then units follow one another from low to high within a
// segment, segments join as in gemm/gemm.hpp.  So a row's bits are its own.
#pragma once

#include "quantized/int8_tile.hpp"

namespace {

// Memory of one call: rows with blocks of 32 columns, and with those of super-blocks, if there are parts for them.
struct Int8Room {
  size_t flat = 0, super = 0;

  explicit Int8Room(const QuantLinearArgs& args) {
    const size_t bytes = static_cast<size_t>(args.rows) * Int8Rows::row_bytes(args.weight.layout.k);
    for (long i = 0; i < args.weight.count; ++i) (has_integer_scales(args.weight.parts[i]) ? super : flat) = bytes;
  }
  size_t all() const { return flat + super; }
};

// One call's operands.
template <class D>
struct Int8Call {
  QuantView weight;
  LinearArgs plain;  // the same for what does not look at weights
  RowCut cut;
  Int8Rows flat, super;  // without memory where no part needs them
  long each;             // panels of an item

  static constexpr long kNumbers = kInt8Units * 2 * 16;  // scales or minimums of a span

  Int8Call(const QuantLinearArgs& args, char* memory)
      : weight(args.weight), plain(as_plain(args)), cut{args.rows}, each(0) {
    const Int8Room room(args);
    const long k = weight.layout.k;
    flat = {room.flat > 0 ? memory : nullptr, k};
    super = {room.super > 0 ? memory + room.flat : nullptr, k};
  }

  void quantize(long row) const {
    const auto* x = static_cast<const typename D::Value*>(plain.x) + row * weight.layout.k;
    if (flat.data != nullptr) quantize_row<D>(weight, x, flat, row, kUnitColumns);
    if (super.data != nullptr) quantize_row<D>(weight, x, super, row, kSuperColumns);
  }

  // All rows of a block times some units of a panel; `to` [rows of the block][16].
  void multiply(Int8Tile tile, const BlockTiles& tiles, float* scratch, float* to) const {
    const QuantPart& part = *tile.part;
    const bool integers = has_integer_scales(part);
    if (!integers) {
      const long columns = part.group == 16 ? 16 : kUnitColumns;
      float* mins = part.min == MinKind::kNone ? nullptr : scratch + kNumbers;
      expand_numbers(part, tile.panel, tile.unit, tile.units * kUnitColumns / columns, columns, scratch, mins);
      tile.scales = scratch;
      tile.mins = mins;
    }
    const Int8Rows& rows = integers ? super : flat;
    tile.row_bytes = Int8Rows::row_bytes(rows.k);
    for (long row = tiles.first(), end = row + tiles.rows(); row < end;) {
      const Int8Rule rule = pick_int8_tile(part, end - row);
      tile.x = rows.values(row) + tile.unit * kUnitColumns;
      tile.sums = rows.sums(row) + tile.unit * kUnitColumns / kSumColumns;
      tile.x_scales = rows.scales(row) + tile.unit;
      tile.acc = to + (row - tiles.first()) * 16;
      rule.tile(tile);
      row += rule.rows;
    }
  }

  // The sums of all rows of a block for one panel, in the first slot.
  void sum_panel(long panel, const BlockTiles& tiles, float* scratch, float* slots) const {
    const PackedView& w = weight.layout;
    const QuantPart* part = weight.parts;
    while (panel >= part->first_panel + part->panels) ++part;
    const Sums slot{slots, tiles.rows() * 16};
    for (int s = 0; s < w.segments; ++s) {
      float* own = slot.of(s);
      for (long i = 0; i < slot.slot_floats; i += 16) store(own + i, splat(0.0f));
      const long end = w.k_begin[s + 1] / kUnitColumns;
      for (long unit = w.k_begin[s] / kUnitColumns, next; unit < end; unit = next) {
        next = min_of(end, (unit / kInt8Units + 1) * kInt8Units);  // so super-blocks are whole but at the ends of segments
        multiply({part, panel - part->first_panel, unit, next - unit, nullptr, nullptr, nullptr, nullptr, nullptr, 0, nullptr},
                 tiles, scratch, own);
      }
      slot.close(s);
    }
  }

  long groups() const { return (panels_to_cut(plain) + each - 1) / each; }
  long items() const { return groups() * cut.blocks(); }

  // Some panels for the rows of a block, of a gate each with its counterpart.
  void run(long item, int worker) const {
    const long panel = item % groups() * each, end = min_of(panels_to_cut(plain), panel + each), block = item / groups();
    const BlockTiles tiles(cut, block);
    const size_t floats = static_cast<size_t>(2 * kNumbers + kSlots * tiles.rows() * 16);
    float* scratch = static_cast<float*>(workspace(worker, floats * 4));
    const auto sum = [&](const PanelGroup& group, float* slots) { sum_panel(group.panel, tiles, scratch, slots); };
    each_group<D>(plain, panel, end, [](long) { return 1; }, tiles.first(), tiles.rows(), scratch + 2 * kNumbers, sum);
  }
};

template <class D>
void linear_int8(const QuantLinearArgs& args) {
  if (args.rows == 0) return;
  Int8Call<D> call(args, static_cast<char*>(shared_workspace(Int8Room(args).all())));
  const PackedView& w = args.weight.layout;
  each_item(args.rows, static_cast<double>(args.rows * w.k) * 4, [&](long row, int) { call.quantize(row); });
  const double work = product_work(args.rows, w);
  call.each = panels_an_item(panels_to_cut(call.plain), 1, work / static_cast<double>(call.cut.blocks()));
  each_item(call.items(), work, [&](long item, int worker) { call.run(item, worker); });
}

template <class D>
void linear_group_int8(const QuantGroup& group) {
  double work = 0, quantize_work = 0;
  size_t bytes = 0;
  for (long i = 0; i < group.count; ++i) {
    const QuantLinearArgs& args = group.calls[i];
    work += product_work(args.rows, args.weight.layout);
    quantize_work += static_cast<double>(args.rows * args.weight.layout.k) * 4;
    bytes += Int8Room(args).all();
  }
  using Calls = CallList<Int8Call<D>>;
  const Calls list(static_cast<char*>(shared_workspace(Calls::bytes(group.count) + bytes)), group.count);
  char* memory = list.behind();
  for (long i = 0; i < group.count; ++i) {
    Int8Call<D>& call = list.calls[i];
    call = Int8Call<D>(group.calls[i], memory);
    const double own = product_work(call.plain.rows, call.plain.weight) / static_cast<double>(call.cut.blocks());
    call.each = panels_of_share(panels_to_cut(call.plain), 1, own, work);
    memory += Int8Room(group.calls[i]).all();
  }
  each_item(group.count, quantize_work, [&](long i, int) {
    for (long row = 0; row < group.calls[i].rows; ++row) list.calls[i].quantize(row);
  });
  list.run(work);
}

}  // namespace
