// x W^T over packed weights, segment by segment, and rows of a packed table.
//
// A work item is a group of panels times a block of rows.  Inside it, K is cut into spans that keep the panels in the
// second-level cache; an accumulator that is stored and loaded between two spans keeps its bits.
#pragma once

#include "family.hpp"
#include "pool.hpp"
#include "tile.hpp"

namespace {

using namespace penstock;

constexpr long kRowBlock = 192;
constexpr long kSpanSteps = 1024;
constexpr int kTreeSlots = 4;  // open sums of a binary tree over 8 segments

constexpr double kAloneBelow = 1 << 17;  // multiply-adds (or cells read) below which waking threads costs more

// fn(item, worker) for every item; on the caller alone when the work is small.
template <class Fn>
void each_item(long items, double work, const Fn& fn) {
  if (work < kAloneBelow) {
    for (long item = 0; item < items; ++item) fn(item, 0);
    return;
  }
  parallel(items, const_cast<Fn*>(&fn),
           [](void* context, long item, int worker) { (*static_cast<const Fn*>(context))(item, worker); });
}

PS_INLINE long min_of(long a, long b) { return a < b ? a : b; }

// Inputs of all rows as the cells want them: every segment begins a cell, the gaps are zero.
template <class D>
void spread_inputs(const LinearArgs& args, typename D::Value* to) {
  using Value = typename D::Value;
  const PackedView& w = args.weight;
  const long width = w.steps() * D::kPerCell;
  __builtin_memset(to, 0, static_cast<size_t>(args.rows) * width * sizeof(Value));
  for (long row = 0; row < args.rows; ++row)
    for (int s = 0; s < w.segments; ++s)
      __builtin_memcpy(to + row * width + w.step_begin[s] * D::kPerCell,
                       static_cast<const Value*>(args.x) + row * w.k + w.k_begin[s],
                       static_cast<size_t>(w.k_begin[s + 1] - w.k_begin[s]) * sizeof(Value));
}

void add_into(float* to, const float* from, long count) {
  for (long i = 0; i < count; i += 16) store(to + i, load(to + i) + load(from + i));
}

// One tile's finished sums [rows][panels * 16] to their place in the output.
void write_tile(const LinearArgs& args, const float* sums, long row, int rows, long panel, int panels) {
  for (int m = 0; m < rows; ++m)
    for (int p = 0; p < panels; ++p) {
      const long column = (panel + p) * 16;
      float* to = args.out + (row + m) * args.weight.n + column;
      const int count = static_cast<int>(min_of(16, args.weight.n - column));
      F16 sum = load(sums + (m * panels + p) * 16);
      if (args.add) sum = load_part<F16>(to, count) + sum;
      store_part(to, sum, count);
    }
}

// All rows of a block for `panels` panels.  Tiles of rows are as equal as can be.
template <class D>
void linear_block(const LinearArgs& args, const char* x, long row, long rows, long panel, int panels, float* slots) {
  const PackedView& w = args.weight;
  const long steps = w.steps();
  const size_t x_stride = static_cast<size_t>(steps) * 4;
  const long tiles = (rows + kMaxRows - 1) / kMaxRows;
  const long span = tiles > 1 ? kSpanSteps : steps;
  const long slot_floats = rows * panels * 16;

  TileArgs tile;
  tile.bases = 1;
  tile.step_stride = 16;
  tile.x_stride = x_stride;
  tile.acc_stride = static_cast<size_t>(panels) * 16;
  for (int p = 0; p < panels; ++p) tile.offset[p] = static_cast<ptrdiff_t>(p * steps * 16);

  int open = 0;  // sums in slots below this one wait for their right neighbour
  for (int s = 0; s < w.segments; ++s) {
    float* slot = slots + open * slot_floats;
    const long end = w.step_begin[s + 1];
    long from = w.step_begin[s];
    do {  // once at least: an empty segment is a sum of zero
      tile.steps = min_of(span, end - from);
      tile.base[0] = w.cells + (panel * steps + from) * 16;
      for (long t = 0; t < tiles; ++t) {
        const long first = t * rows / tiles;
        const int count = static_cast<int>((t + 1) * rows / tiles - first);
        tile.x = x + (row + first) * x_stride + from * 4;
        tile.acc = slot + first * panels * 16;
        pick_tile<D>(count, panels)(tile, from != w.step_begin[s]);
      }
      from += tile.steps;
    } while (from < end);
    ++open;
    for (int left = s; left & 1; left >>= 1) {
      --open;
      add_into(slots + (open - 1) * slot_floats, slots + open * slot_floats, slot_floats);
    }
  }
  for (long t = 0; t < tiles; ++t) {
    const long first = t * rows / tiles;
    const int count = static_cast<int>((t + 1) * rows / tiles - first);
    write_tile(args, slots + first * panels * 16, row + first, count, panel, panels);
  }
}

template <class D>
void linear_of(const LinearArgs& args, const char* x) {
  const long panels = args.weight.panels();
  const long groups = (panels + kGroup - 1) / kGroup;
  const long blocks = (args.rows + kRowBlock - 1) / kRowBlock;
  const double work = static_cast<double>(args.rows + 4) * static_cast<double>(panels * 16 * args.weight.steps());
  each_item(groups * blocks, work, [&](long item, int worker) {
    const long block = item / groups, group = item % groups;
    const long row = block * args.rows / blocks;
    const long rows = (block + 1) * args.rows / blocks - row;
    const long tiles = (rows + kMaxRows - 1) / kMaxRows;
    const int wide = panels_at_once(static_cast<int>((rows + tiles - 1) / tiles));
    float* slots = static_cast<float*>(workspace(worker, kTreeSlots * static_cast<size_t>(rows) * wide * 64));
    const long end = min_of(panels, (group + 1) * kGroup);
    for (long panel = group * kGroup; panel < end;) {
      const int count = panel + wide <= end ? wide : 1;
      linear_block<D>(args, x, row, rows, panel, count, slots);
      panel += count;
    }
  });
}

template <class D>
void linear_typed(const LinearArgs& args) {
  if (args.rows == 0) return;
  if (args.weight.direct()) {
    linear_of<D>(args, static_cast<const char*>(args.x));
    return;
  }
  const size_t bytes = static_cast<size_t>(args.rows) * args.weight.steps() * 4;
  auto* spread = static_cast<typename D::Value*>(__builtin_malloc(bytes + 64));
  if (spread == nullptr) __builtin_trap();
  spread_inputs<D>(args, spread);
  linear_of<D>(args, reinterpret_cast<const char*>(spread));
  __builtin_free(spread);
}

template <class D>
void embed_typed(const EmbedArgs& args) {
  const PackedView& w = args.table;
  const long steps = w.steps();
  each_item(args.rows, static_cast<double>(args.rows) * static_cast<double>(w.k) * 4, [&](long row, int) {
    const long n = args.tokens[row];
    const uint32_t* lane = w.cells + (n / 16) * steps * 16 + n % 16;
    float* to = args.out + row * w.k;
    for (int s = 0; s < w.segments; ++s) {
      const uint32_t* cell = lane + w.step_begin[s] * 16;
      for (long k = w.k_begin[s]; k < w.k_begin[s + 1]; k += D::kPerCell, cell += 16) {
        const uint32_t early = D::kPerCell == 2 ? *cell << 16 : *cell;
        __builtin_memcpy(to + k, &early, 4);
        const uint32_t late = *cell & 0xFFFF0000u;
        if (D::kPerCell == 2 && k + 1 < w.k_begin[s + 1]) __builtin_memcpy(to + k + 1, &late, 4);
      }
    }
  });
}

}  // namespace
