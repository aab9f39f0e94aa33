// x W^T over packed weights, segment by segment, and rows of a packed table.
//
// A work item is a group of panels times a block of rows; several products may share their items.  Inside it, K is cut into spans that keep the panels in the
// second-level cache; an accumulator that is stored and loaded between two spans keeps its bits.
#pragma once

#include "family.hpp"
#include "pick.hpp"
#include "pool.hpp"
#include "tile.hpp"

namespace {

using namespace penstock;

constexpr long kRowBlock = 192;
constexpr long kSpanSteps = 1024;
constexpr long kItemsAThread = 8;
constexpr int kTreeSlots = 4;  // open sums of a binary tree over 8 segments

constexpr double kMostAnItem = 1 << 23;  // multiply-adds or cells of one item: some 100 us
constexpr double kAloneBelow = 1 << 17;  // multiply-adds (or cells read) below which waking threads costs more

// fn(item, worker) for every item; on the caller alone when the work is small.
template <class Fn>
void each_item(long items, double work, const Fn& fn) {
  if (work < kAloneBelow) {
    for (long item = 0; item < items; ++item) fn(item, 0);
    return;
  }
  parallel(items, const_cast<Fn*>(&fn),
           [](void* context, long item, int worker) { (*static_cast<const Fn*>(context))(item, worker); }, work);
}

// Panels of an item, a multiple of `wide`: enough items for all hands, none longer than others may have to wait for it.
inline long panels_an_item(long panels, int wide, double work) {
  const long items = kItemsAThread * hands() > work / kMostAnItem ? kItemsAThread * hands() : static_cast<long>(work / kMostAnItem);
  return (panels / items + wide) / wide * wide;
}

PS_INLINE long min_of(long a, long b) { return a < b ? a : b; }

// Rows are cut into blocks, blocks into tiles of nearly equal size; every call with so many rows cuts the same way.
struct RowCut {
  long rows;

  long blocks() const { return (rows + kRowBlock - 1) / kRowBlock; }
  long block_begin(long block) const { return block * rows / blocks(); }
  long tiles(long block) const { return (block_begin(block + 1) - block_begin(block) + kMaxRows - 1) / kMaxRows; }
  long largest_tile() const {
    const long block = (rows + blocks() - 1) / blocks();  // rows of the largest block
    const long count = (block + kMaxRows - 1) / kMaxRows;
    return (block + count - 1) / count;
  }
  long tile_begin(long block, long tile) const {
    return block_begin(block) + tile * (block_begin(block + 1) - block_begin(block)) / tiles(block);
  }
};

// x as the tiles read it: rows `stride` bytes apart when given as is; else tiles of [steps][rows] cells, one after
// another, so that a tile is read from end to end.
struct Inputs {
  const char* data;
  bool packed;
  size_t row_bytes;

  void place(TileArgs& tile, long row, int rows, long step) const {
    const size_t cells = packed ? rows : 1;
    tile.x = data + row * row_bytes + step * cells * 4;
    tile.x_stride = packed ? 4 : row_bytes;
    tile.x_step = cells * 4;
  }
};

// One tile's rows to cells: every segment begins a cell, gaps are zero.
template <class D>
void pack_inputs(const LinearArgs& args, long row, int rows, uint32_t* to) {
  using Value = typename D::Value;
  const PackedView& w = args.weight;
  for (int s = 0; s < w.segments; ++s)
    for (int m = 0; m < rows; ++m) {
      const Value* x = static_cast<const Value*>(args.x) + (row + m) * w.k;
      uint32_t* cell = to + w.step_begin[s] * rows + m;
      long k = w.k_begin[s];
      for (; k + D::kPerCell <= w.k_begin[s + 1]; k += D::kPerCell, cell += rows) *cell = load_cell(x + k);
      if (k < w.k_begin[s + 1]) __builtin_memcpy(cell, x + k, sizeof(Value)), *cell &= 0xFFFFu;
    }
}

// All tiles of a block.
template <class D>
void pack_block(const LinearArgs& args, const RowCut& cut, long block, char* packed, size_t row_bytes) {
  for (long t = 0; t < cut.tiles(block); ++t) {
    const long row = cut.tile_begin(block, t);
    const int rows = static_cast<int>(cut.tile_begin(block, t + 1) - row);
    pack_inputs<D>(args, row, rows, reinterpret_cast<uint32_t*>(packed + row * row_bytes));
  }
}

PS_INLINE size_t packed_row_bytes(const PackedView& w) { return static_cast<size_t>(w.steps()) * 4; }

template <class D>
Inputs pack_all_inputs(const LinearArgs& args, const RowCut& cut) {
  const PackedView& w = args.weight;
  const size_t row_bytes = packed_row_bytes(w);
  char* packed = static_cast<char*>(shared_workspace(args.rows * row_bytes));
  const double work = static_cast<double>(args.rows * w.steps()) * 4;
  const long tiles = (cut.rows + kMaxRows - 1) / kMaxRows / cut.blocks() + 1;  // at least those of any block
  each_item(cut.blocks() * tiles, work, [&](long item, int) {
    const long block = item / tiles, t = item % tiles;
    if (t >= cut.tiles(block)) return;
    const long row = cut.tile_begin(block, t);
    const int rows = static_cast<int>(cut.tile_begin(block, t + 1) - row);
    pack_inputs<D>(args, row, rows, reinterpret_cast<uint32_t*>(packed + row * row_bytes));
  });
  return {packed, true, row_bytes};
}

// As few rows as fit one tile are taken where they lie, if they lie as the cells want them.
PS_INLINE bool taken_as_given(const LinearArgs& args) { return args.rows <= kMaxRows && args.weight.direct(); }
PS_INLINE Inputs given_inputs(const LinearArgs& args) {
  return {static_cast<const char*>(args.x), false, packed_row_bytes(args.weight)};
}

template <class D>
Inputs prepare_inputs(const LinearArgs& args, const RowCut& cut) {
  return taken_as_given(args) ? given_inputs(args) : pack_all_inputs<D>(args, cut);
}

void add_into(float* to, const float* from, long count) {
  for (long i = 0; i < count; i += 16) store(to + i, load(to + i) + load(from + i));
}

// One tile's finished sums [rows][panels * 16] to their place in the output, or to the best tokens of their rows.
void write_tile(const LinearArgs& args, float* sums, long row, int rows, long panel, int panels) {
  for (int m = 0; m < rows; ++m) {
    if (args.picks != nullptr && row + m >= args.stored) {
      if (args.form.changes())
        for (float *x = sums + m * panels * 16, *end = x + panels * 16; x < end; x += 16) store(x, formed(load(x), args.form));
      offer(args.picks[row + m - args.stored], sums + m * panels * 16, panel * 16, min_of(panels * 16, args.weight.n - panel * 16));
      continue;
    }
    for (int p = 0; p < panels; ++p) {
      const long column = (panel + p) * 16;
      float* to = args.out + (row + m) * args.weight.n + column;
      const int count = static_cast<int>(min_of(16, args.weight.n - column));
      F16 sum = load(sums + (m * panels + p) * 16);
      if (args.add) sum = load_part<F16>(to, count) + sum;
      store_part(to, sum, count);
    }
  }
}

// Tile t of a span fetches its share of what is multiplied after the span: the same panels from step `next` on, or the
// next panels.  Of three panels and two tiles each takes one panel and a half, else a tile takes one.
void fetch_ahead(TileArgs& tile, const PackedView& w, long panel, int panels, long next, long t, long tiles) {
  const long steps = w.steps();
  const char* pieces = reinterpret_cast<const char*>(w.cells + (next < steps ? panel * steps + next : (panel + panels) * steps) * 16);
  const size_t piece = static_cast<size_t>(steps) * 64;
  tile.ahead[0] = tile.ahead[1] = tile.x;
  tile.ahead_step[0] = tile.ahead_step[1] = 0;
  if (tiles == 2 && panels == 3) {
    tile.ahead[0] = pieces + 2 * t * piece;
    tile.ahead_step[0] = 64;
    tile.ahead[1] = pieces + piece + t * tile.steps * 32;
    tile.ahead_step[1] = 32;
  } else if (t < panels) {
    tile.ahead[0] = pieces + t * piece;
    tile.ahead_step[0] = 64;
  }
}

// All rows of a block for `panels` panels.
template <class D>
void linear_block(const LinearArgs& args, const Inputs& x, const RowCut& cut, long block, long panel, int panels,
                  float* slots) {
  const PackedView& w = args.weight;
  const long steps = w.steps(), tiles = cut.tiles(block), first = cut.block_begin(block);
  const long span = tiles == 1 ? steps : kSpanSteps;
  const long slot_floats = (cut.block_begin(block + 1) - first) * panels * 16;

  TileArgs tile;
  tile.bases = 1;
  tile.step_stride = 16;
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
        const long row = cut.tile_begin(block, t);
        const int rows = static_cast<int>(cut.tile_begin(block, t + 1) - row);
        x.place(tile, row, rows, from);
        fetch_ahead(tile, w, panel, panels, from + tile.steps, t, tiles);
        tile.acc = slot + (row - first) * panels * 16;
        const TileFn run = tiles == 1 ? pick_tile<D, Fetch::kStream>(rows, panels) : pick_tile<D, Fetch::kAhead>(rows, panels);
        run(tile, from != w.step_begin[s]);
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
    const long row = cut.tile_begin(block, t);
    const int rows = static_cast<int>(cut.tile_begin(block, t + 1) - row);
    write_tile(args, slots + (row - first) * panels * 16, row, rows, panel, panels);
  }
}

PS_INLINE double product_work(long rows, const PackedView& w) {
  return static_cast<double>(rows + 4) * static_cast<double>(w.panels() * 16 * w.steps());
}

// One product, cut into items.
template <class D>
struct LinearCall {
  LinearArgs args;
  RowCut cut;
  Inputs x;
  int wide;   // panels at once
  long each;  // panels of an item

  long groups() const { return (args.weight.panels() + each - 1) / each; }
  long items() const { return groups() * cut.blocks(); }

  void run(long item, int worker) const {
    const long block = item / groups(), group = item % groups();
    const long rows = cut.block_begin(block + 1) - cut.block_begin(block);
    float* slots = static_cast<float*>(workspace(worker, kTreeSlots * static_cast<size_t>(rows) * wide * 64));
    const long end = min_of(args.weight.panels(), (group + 1) * each);
    for (long panel = group * each; panel < end;) {
      const int count = panel + wide <= end ? wide : 1;
      linear_block<D>(args, x, cut, block, panel, count, slots);
      panel += count;
    }
  }
};

template <class D>
void linear_typed(const LinearArgs& args) {
  if (args.rows == 0) return;
  const RowCut cut{args.rows};
  const Inputs x = prepare_inputs<D>(args, cut);
  const int wide = panels_at_once(static_cast<int>(cut.largest_tile()));
  const double work = product_work(args.rows, args.weight);
  const long each = panels_an_item(args.weight.panels(), wide, work / static_cast<double>(cut.blocks()));
  const LinearCall<D> call{args, cut, x, wide, each};
  each_item(call.items(), work, [&](long item, int worker) { call.run(item, worker); });
}

// --- several products at once ---------------------------------------------------------------------------------------

// Calls side by side, their items one after another.  `Call` is trivial: it lies in the caller's scratch memory.
template <class Call>
struct CallList {
  Call* calls;
  long* first;  // item of each call; of one more, all items
  long count;

  static size_t bytes(long count) { return static_cast<size_t>(count) * (sizeof(Call) + sizeof(long)) + 128; }

  CallList(char* memory, long calls_count)
      : calls(reinterpret_cast<Call*>(memory)),
        first(reinterpret_cast<long*>(memory + static_cast<size_t>(calls_count) * sizeof(Call))),
        count(calls_count) {}

  char* behind() const { return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(first + count + 1) + 63) & ~uintptr_t{63}); }

  void run(double work) const {
    first[0] = 0;
    for (long i = 0; i < count; ++i) first[i + 1] = first[i] + calls[i].items();
    each_item(first[count], work, [&](long item, int worker) {
      long low = 0, high = count;  // first[low] <= item < first[high]
      while (high - low > 1) {
        const long middle = (low + high) / 2;
        (first[middle] <= item ? low : high) = middle;
      }
      calls[low].run(item - first[low], worker);
    });
  }
};

// Panels of an item of one call among several: items of all calls are worth about the same.
PS_INLINE long panels_of_share(long panels, int wide, double work, double all_work) {
  const double most = static_cast<double>(kItemsAThread * hands()) > all_work / kMostAnItem
                          ? static_cast<double>(kItemsAThread * hands())
                          : all_work / kMostAnItem;
  const double wanted = static_cast<double>(panels) * all_work / most / work;
  return (static_cast<long>(wanted < static_cast<double>(panels) ? wanted : static_cast<double>(panels)) + wide) / wide * wide;
}

template <class D>
void linear_group_typed(const LinearGroup& group) {
  if (group.count == 0) return;
  double work = 0, pack_work = 0;
  size_t packed_bytes = 0;
  for (long i = 0; i < group.count; ++i) {
    const LinearArgs& args = group.calls[i];
    work += product_work(args.rows, args.weight);
    if (taken_as_given(args)) continue;
    packed_bytes += args.rows * packed_row_bytes(args.weight);
    pack_work += static_cast<double>(args.rows * args.weight.steps()) * 4;
  }
  using Calls = CallList<LinearCall<D>>;
  const Calls list(static_cast<char*>(shared_workspace(Calls::bytes(group.count) + packed_bytes)), group.count);
  char* packed = list.behind();
  for (long i = 0; i < group.count; ++i) {
    const LinearArgs& args = group.calls[i];
    const RowCut cut{args.rows};
    const int wide = panels_at_once(static_cast<int>(cut.largest_tile()));
    const double own = product_work(args.rows, args.weight) / static_cast<double>(cut.blocks());
    const long each = panels_of_share(args.weight.panels(), wide, own, work);
    const bool given = taken_as_given(args);
    list.calls[i] = {args, cut, given ? given_inputs(args) : Inputs{packed, true, packed_row_bytes(args.weight)}, wide, each};
    if (!given) packed += args.rows * packed_row_bytes(args.weight);
  }
  if (packed_bytes > 0)
    each_item(group.count, pack_work, [&](long i, int) {
      const LinearCall<D>& call = list.calls[i];
      if (!call.x.packed) return;
      for (long block = 0; block < call.cut.blocks(); ++block)
        pack_block<D>(call.args, call.cut, block, const_cast<char*>(call.x.data), call.x.row_bytes);
    });
  list.run(work);
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
