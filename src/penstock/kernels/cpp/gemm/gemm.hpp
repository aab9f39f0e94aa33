// x W^T over packed weights, segment by segment, and rows of a packed table.
//
// A work item is a group of panels times a block of rows; several products may share their items.  Inside it, K is cut into spans that keep the panels in the
// second-level cache; an accumulator that is stored and loaded between two spans keeps its bits.
#pragma once

#include "gemm/outputs.hpp"
#include "threads/thread_pool.hpp"

namespace {

using namespace penstock;

constexpr long kRowBlock = 192;
constexpr long kSpanSteps = 1024;
constexpr long kItemsAThread = 8;
constexpr int kSlots = 5;  // open sums of a binary tree over 8 segments, and finished ones of a gate

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

// Rows are cut into blocks of whole tiles but for the last one's end, blocks into tiles of nearly equal size; every call
// with this number of rows cuts the same way.
struct RowCut {
  long rows;
  bool tall = false;          // one tile of up to kTallRows
  long most_rows = kMaxRows;  // of another tile

  long blocks() const { return (rows + kRowBlock - 1) / kRowBlock; }
  long block_begin(long block) const { return min_of(rows, block * all_tiles() / blocks() * most_rows); }
  long all_tiles() const { return (rows + most_rows - 1) / most_rows; }
  long tiles(long block) const {
    return tall ? 1 : (block_begin(block + 1) - block_begin(block) + most_rows - 1) / most_rows;
  }
  long largest_tile() const {
    if (tall) return rows;
    if (blocks() > 1) return most_rows;
    return (rows + all_tiles() - 1) / all_tiles();
  }
};

// More rows than a tile takes as given are packed as the family likes them best.
PS_INLINE bool packs_inputs(long rows) { return rows > kMaxRows; }
PS_INLINE RowCut linear_cut(long rows) { return {rows, rows <= kTallRows, packs_inputs(rows) ? kPackedRows : kMaxRows}; }

// The tiles of one block.
struct BlockTiles {
  long count;
  long begin[kRowBlock / kMaxRows + 1];  // row; the last one is the block's end

  BlockTiles(const RowCut& cut, long block) : count(cut.tiles(block)) {
    const long first = cut.block_begin(block), all = cut.block_begin(block + 1) - first;
    for (long t = 0; t <= count; ++t) begin[t] = first + t * all / count;
  }
  long first() const { return begin[0]; }
  long rows() const { return begin[count] - begin[0]; }
  int rows_of(long tile) const { return static_cast<int>(begin[tile + 1] - begin[tile]); }
};

// The same product for what does not look at weights.
template <class View>
PS_INLINE LinearArgs as_plain(const LinearArgsOf<View>& args) {
  return {args.x, args.rows, args.weight.layout, args.out, args.add, args.picks, args.stored,
          args.form, args.gate, args.gated};
}

// x as the tiles read it: rows `row_bytes` apart when given as is; else tiles of [steps][rows] cells (of a widened type
// [steps][rows][2] floats), one after another, so that a tile is read from end to end.
struct Inputs {
  const char* data;
  bool packed;
  size_t row_bytes;
  size_t cell_bytes = 4;  // of one row in one step

  size_t step_bytes(int rows) const { return packed ? static_cast<size_t>(rows) * cell_bytes : cell_bytes; }
  const char* at(long row, int rows, long step) const { return data + row * row_bytes + step * step_bytes(rows); }
  void place(TileArgs& tile, long row, int rows, long step) const {
    tile.x = at(row, rows, step);
    tile.x_stride = packed ? cell_bytes : row_bytes;
    tile.x_step = step_bytes(rows);
  }
};

// The same rows to floats.
PS_INLINE void widen_inputs(const LinearArgs& args, long row, int rows, uint32_t* to) {
  const PackedView& w = args.weight;
  for (int m = 0; m < rows; ++m) {
    const uint16_t* from = static_cast<const uint16_t*>(args.x) + (row + m) * w.k;
    uint32_t* own = to + m * 2;
    for (int s = 0; s < w.segments; ++s) {
      long left = w.k_begin[s + 1] - w.k_begin[s];
      for (; left > 0; left -= 2, from += 2, own += 2 * rows) {
        own[0] = static_cast<uint32_t>(from[0]) << 16;
        own[1] = left > 1 ? static_cast<uint32_t>(from[1]) << 16 : 0;
      }
      from += left;  // -1 behind an odd number of columns
    }
  }
}

// One tile's rows to cells: every segment begins a cell, gaps are zero.
template <class D>
void pack_inputs(const LinearArgs& args, long row, int rows, uint32_t* to) {
  if constexpr (D::kInputBytes == 8) return widen_inputs(args, row, rows, to);
  using Value = typename D::Value;
  const PackedView& w = args.weight;
  for (int s = 0; s < w.segments; ++s) {
    const Value* from = static_cast<const Value*>(args.x) + row * w.k + w.k_begin[s];
    const long columns = w.k_begin[s + 1] - w.k_begin[s], whole = columns / D::kPerCell;
    uint32_t* const cells = to + w.step_begin[s] * rows;
    const long done = transpose_cells(from, w.k * sizeof(Value), rows, whole, cells);
    for (int m = 0; m < rows; ++m, from += w.k) {
      uint32_t* cell = cells + done * rows + m;
      for (long c = done; c < whole; ++c, cell += rows) *cell = load_cell(from + c * D::kPerCell);
      if (whole * D::kPerCell < columns) __builtin_memcpy(cell, from + columns - 1, sizeof(Value)), *cell &= 0xFFFFu;
    }
  }
}

PS_INLINE size_t packed_row_bytes(const PackedView& w, size_t cell_bytes = 4) {
  return static_cast<size_t>(w.steps()) * cell_bytes;
}

// All tiles of a block.
template <class D>
void pack_block(const LinearArgs& args, const RowCut& cut, long block, char* packed) {
  const BlockTiles own(cut, block);
  const size_t row_bytes = packed_row_bytes(args.weight, D::kInputBytes);
  for (long t = 0; t < own.count; ++t)
    pack_inputs<D>(args, own.begin[t], own.rows_of(t), reinterpret_cast<uint32_t*>(packed + own.begin[t] * row_bytes));
}

// `packed`: room for all rows.
template <class D>
Inputs pack_all_inputs(const LinearArgs& args, const RowCut& cut, char* packed) {
  const PackedView& w = args.weight;
  const size_t row_bytes = packed_row_bytes(w, D::kInputBytes);
  const double work = static_cast<double>(args.rows * w.steps()) * 4;
  const long tiles = cut.all_tiles() / cut.blocks() + 1;  // at least those of any block
  each_item(cut.blocks() * tiles, work, [&](long item, int) {
    const long block = item / tiles, t = item % tiles;
    if (t >= cut.tiles(block)) return;
    const BlockTiles own(cut, block);
    pack_inputs<D>(args, own.begin[t], own.rows_of(t), reinterpret_cast<uint32_t*>(packed + own.begin[t] * row_bytes));
  });
  return {packed, true, row_bytes, D::kInputBytes};
}

template <class D>
Inputs pack_all_inputs(const LinearArgs& args, const RowCut& cut) {
  const size_t bytes = args.rows * packed_row_bytes(args.weight, D::kInputBytes);
  return pack_all_inputs<D>(args, cut, static_cast<char*>(shared_workspace(bytes)));
}

// As few rows as fit one tile are taken where they lie, if they lie as the cells want them.
PS_INLINE bool taken_as_given(const LinearArgs& args) { return args.rows <= kMaxRows && args.weight.direct(); }
PS_INLINE Inputs given_inputs(const LinearArgs& args) {
  return {static_cast<const char*>(args.x), false, packed_row_bytes(args.weight)};
}

// As `prepare_inputs` packs them.
template <class D>
PS_INLINE size_t prepared_input_bytes(long rows) { return packs_inputs(rows) ? D::Wide::kInputBytes : D::kInputBytes; }
template <class D>
PS_INLINE size_t prepared_row_bytes(const LinearArgs& args) {
  return packed_row_bytes(args.weight, prepared_input_bytes<D>(args.rows));
}

template <class D>
Inputs prepare_inputs(const LinearArgs& args, const RowCut& cut) {
  if (taken_as_given(args)) return given_inputs(args);
  return packs_inputs(args.rows) ? pack_all_inputs<typename D::Wide>(args, cut) : pack_all_inputs<D>(args, cut);
}

void add_into(float* to, const float* from, long count) {
  for (long i = 0; i < count; i += 16) store(to + i, load(to + i) + load(from + i));
}

// Sums of one group of panels, in the slots of a binary tree over segments: those on the left wait for their right
// neighbors.
struct Sums {
  float* slots;
  long slot_floats;

  static int lefts(int segment) { return __builtin_ctz(~static_cast<unsigned>(segment)); }  // that end with it
  float* of(int segment) const { return slots + __builtin_popcount(static_cast<unsigned>(segment)) * slot_floats; }
  void close(int segment) const {
    float* own = of(segment);
    for (int left = lefts(segment); left > 0; --left, own -= slot_floats) add_into(own - slot_floats, own, slot_floats);
  }
};

// What tile t of a span fetches besides the x of the tile after it: its share of `next`, the panels `piece` bytes apart
// that are multiplied after the span.  Of two tiles each takes one panel and a half, and leaves x to the processor.
void fetch_ahead(TileArgs& tile, const uint32_t* next, size_t piece, int panels, long t, long tiles) {
  const char* pieces = reinterpret_cast<const char*>(next);
  if (tiles == 2 && panels == 3) {
    tile.ahead[0] = pieces + 2 * t * piece;
    tile.ahead_step[0] = 64;
    tile.ahead[1] = pieces + piece + t * tile.steps * 32;
    tile.ahead_step[1] = 32;
    return;
  }
  tile.ahead[0] = t < panels ? pieces + t * piece : tile.x;
  tile.ahead_step[0] = t < panels ? 64 : 0;
}

// Panels that are summed together, and the first of those that come after them.
struct PanelGroup {
  long panel;
  int panels;
  long next;
};

// `alone`: no other tile reads the same panels.
template <class D>
PS_INLINE TileFn pick_linear_tile(const Inputs& x, int rows, int panels, bool alone) {
  using Wide = typename D::Wide;
  if (x.cell_bytes == Wide::kInputBytes)
    return alone ? pick_tile<Wide, Fetch::kStream>(rows, panels) : pick_tile<Wide, Fetch::kAhead>(rows, panels);
  return alone ? pick_tile<D, Fetch::kStream>(rows, panels) : pick_tile<D, Fetch::kAhead>(rows, panels);
}

// The sums of all rows of a block for a group of panels: [rows][panels * 16] in the first slot.
template <class D>
void sum_block(const PackedView& w, const Inputs& x, const BlockTiles& tiles, const PanelGroup& group, float* slots) {
  const long steps = w.steps(), span = tiles.count == 1 ? steps : kSpanSteps, width = group.panels * 16;
  const Sums sums{slots, tiles.rows() * width};

  TileArgs tile;
  tile.bases = 1;
  tile.step_stride = 16;
  tile.acc_stride = static_cast<size_t>(width);
  tile.left_stride = sums.slot_floats;
  for (int p = 0; p < group.panels; ++p) tile.offset[p] = static_cast<ptrdiff_t>(p * steps * 16);

  for (int s = 0; s < w.segments; ++s) {
    const long end = w.step_begin[s + 1];
    long from = w.step_begin[s];
    do {  // once at least: an empty segment is a sum of zero
      const bool resume = from != w.step_begin[s];
      tile.base[0] = w.cells + (group.panel * steps + from) * 16;
      tile.steps = min_of(span, end - from);
      from += tile.steps;
      tile.lefts = from == end ? sums.lefts(s) : 0;
      const uint32_t* next = w.cells + (from < steps ? group.panel * steps + from : group.next * steps) * 16;
      for (long t = 0; t < tiles.count; ++t) {
        const int rows = tiles.rows_of(t);
        const bool last = t + 1 == tiles.count;
        x.place(tile, tiles.begin[t], rows, from - tile.steps);
        tile.ahead[1] = last ? x.at(tiles.begin[0], tiles.rows_of(0), from < steps ? from : 0)
                             : x.at(tiles.begin[t + 1], tiles.rows_of(t + 1), from - tile.steps);
        tile.ahead_step[1] = tile.x_step;
        fetch_ahead(tile, next, static_cast<size_t>(steps) * 64, group.panels, t, tiles.count);
        tile.acc = sums.of(s) + (tiles.begin[t] - tiles.first()) * width;
        pick_linear_tile<D>(x, rows, group.panels, tiles.count == 1)(tile, resume);
      }
    } while (from < end);
  }
}

// A gate's panels are followed by as many of what it is multiplied with; items are cut from the gate's.
PS_INLINE long panels_to_cut(const LinearArgs& args) {
  return args.gate == nullptr ? args.weight.panels() : args.weight.panels() / 2;
}

// sum(group, slots) for panels [panel, end), of which `at_once(panel)` are taken together; each group's sums then go to
// where they belong: rows [row, row + rows).  For a gate each group is followed by its counterpart.
template <class D, class AtOnce, class Sum>
PS_INLINE void each_group(const LinearArgs& args, long panel, long end, const AtOnce& at_once, long row, long rows,
                          float* slots, const Sum& sum) {
  const int count = static_cast<int>(rows);
  for (int panels; panel < end; panel += panels) {
    panels = at_once(panel);
    if (args.gate == nullptr) {
      sum(PanelGroup{panel, panels, panel + panels}, slots);
      write_tile(args, slots, row, count, panel, panels);
      continue;
    }
    const long other = panel + panels_to_cut(args);
    float* const second = slots + rows * panels * 16;
    sum(PanelGroup{panel, panels, other}, slots);
    sum(PanelGroup{other, panels, panel + panels}, second);
    write_gated<D>(args, slots, second, row, count, panel, panels);
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

  long groups() const { return (panels_to_cut(args) + each - 1) / each; }
  long items() const { return groups() * cut.blocks(); }

  void run(long item, int worker) const {
    const BlockTiles tiles(cut, item / groups());
    float* slots = static_cast<float*>(workspace(worker, kSlots * static_cast<size_t>(tiles.rows()) * wide * 64));
    const long panel = item % groups() * each, end = min_of(panels_to_cut(args), panel + each);
    const auto at_once = [&](long from) { return panels_left(end - from, wide); };
    const auto sum = [&](const PanelGroup& group, float* to) { sum_block<D>(args.weight, x, tiles, group, to); };
    each_group<D>(args, panel, end, at_once, tiles.first(), tiles.rows(), slots, sum);
  }
};

template <class D>
void linear_typed(const LinearArgs& args) {
  if (args.rows == 0) return;
  const RowCut cut = linear_cut(args.rows);
  const Inputs x = prepare_inputs<D>(args, cut);
  const int wide = panels_at_once(static_cast<int>(cut.largest_tile()));
  const double work = product_work(args.rows, args.weight);
  const long each = panels_an_item(panels_to_cut(args), wide, work / static_cast<double>(cut.blocks()));
  const LinearCall<D> call{args, cut, x, wide, each};
  each_item(call.items(), work, [&](long item, int worker) { call.run(item, worker); });
}

// --- several products at once ---------------------------------------------------------------------------------------

// Calls side by side, their items one after another.  `Call` is trivially copyable: it lies in the caller's scratch memory.
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
    packed_bytes += args.rows * prepared_row_bytes<D>(args);
    pack_work += static_cast<double>(args.rows * args.weight.steps()) * 4;
  }
  using Calls = CallList<LinearCall<D>>;
  const Calls list(static_cast<char*>(shared_workspace(Calls::bytes(group.count) + packed_bytes)), group.count);
  char* packed = list.behind();
  for (long i = 0; i < group.count; ++i) {
    const LinearArgs& args = group.calls[i];
    const RowCut cut = linear_cut(args.rows);
    const int wide = panels_at_once(static_cast<int>(cut.largest_tile()));
    const double own = product_work(args.rows, args.weight) / static_cast<double>(cut.blocks());
    const long each = panels_of_share(panels_to_cut(args), wide, own, work);
    const bool given = taken_as_given(args);
    const size_t row_bytes = prepared_row_bytes<D>(args);
    const Inputs x = given ? given_inputs(args) : Inputs{packed, true, row_bytes, prepared_input_bytes<D>(args.rows)};
    list.calls[i] = {args, cut, x, wide, each};
    if (!given) packed += args.rows * row_bytes;
  }
  if (packed_bytes > 0)
    each_item(group.count, pack_work, [&](long i, int) {
      const LinearCall<D>& call = list.calls[i];
      if (!call.x.packed) return;
      for (long block = 0; block < call.cut.blocks(); ++block)
        (packs_inputs(call.args.rows) ? pack_block<typename D::Wide> : pack_block<D>)(call.args, call.cut, block,
                                                                                     const_cast<char*>(call.x.data));
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
