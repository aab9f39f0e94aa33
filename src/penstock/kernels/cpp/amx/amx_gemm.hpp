// x W^T with the tiles of Intel AMX: sixteen rows of x times a panel of sixteen outputs, 32 columns of K at a time.
//
// The packed layout of weights is that of the second operand: sixteen steps of a panel are one tile as they lie.  The
// first operand is read where x lies.  The end of a segment that is no whole tile is filled up with zeros in a copy.
//
// An output is summed in the order of TDPBF16PS (Intel SDM, volume 2): in each 32 columns the even and the odd ones are
// two chains of fused multiply-adds from zero, whose sum is added to that of the columns before; denormals are zero.
// A row is a line of a tile, which knows nothing of the others, so its bits do not depend on their number; segments and
// their tree are those of gemm/gemm.hpp.  Compressed weights are decoded to a buffer in the first-level cache, a few tiles
// at a time: AMX reads tiles from memory only, so there is no way through registers.
#pragma once

#include "amx/amx_tiles.hpp"
#include "compressed/compressed_gemm.hpp"

namespace {

constexpr long kTileSteps = 16;                 // of K: cells
constexpr long kTileCells = kTileSteps * 16;    // of a panel
constexpr int kTilePanels = 2;                  // at a time, so that a tile of x is used twice
constexpr long kPairRows = 2 * kTileRows;       // at a time, so that a tile of weights is used twice
constexpr long kBlockPairs = 6;                 // pairs of row tiles that one item multiplies with its panels
constexpr long kLongestRun = 64;                // tiles of K that stay in the second-level cache for all of them
constexpr long kDecodedTiles = 4;               // of one panel, in the first-level cache

PS_INLINE long tiles_of(long steps) { return (steps + kTileSteps - 1) / kTileSteps; }

// Rows of x in which every segment is a whole number of tiles.
struct TileInputs {
  const char* data;
  size_t row_bytes;
  long begin[kMaxSegments + 1];  // tile at which a segment begins
};

// x where it lies if that serves, else a copy with zeros at the ends of segments.
TileInputs tile_inputs(const LinearArgs& args) {
  const PackedView& w = args.weight;
  TileInputs x{static_cast<const char*>(args.x), static_cast<size_t>(w.k) * 2, {0}};
  bool fits = w.direct();
  for (int s = 0; s < w.segments; ++s) {
    x.begin[s + 1] = x.begin[s] + tiles_of(w.step_begin[s + 1] - w.step_begin[s]);
    fits = fits && x.begin[s + 1] * kTileSteps == w.step_begin[s + 1];
  }
  if (fits) return x;
  x.row_bytes = static_cast<size_t>(x.begin[w.segments]) * kTileBytes;
  char* copy = static_cast<char*>(shared_workspace(static_cast<size_t>(args.rows) * x.row_bytes));
  x.data = copy;
  each_item(args.rows, static_cast<double>(args.rows * w.steps()) * 4, [&](long row, int) {
    char* to = copy + static_cast<size_t>(row) * x.row_bytes;
    const uint16_t* from = static_cast<const uint16_t*>(args.x) + row * w.k;
    __builtin_memset(to, 0, x.row_bytes);
    for (int s = 0; s < w.segments; ++s)
      __builtin_memcpy(to + x.begin[s] * kTileBytes, from + w.k_begin[s],
                       static_cast<size_t>(w.k_begin[s + 1] - w.k_begin[s]) * 2);
  });
  return x;
}

// What is multiplied next: whole tiles of each panel, one after another.
struct TileCells {
  const uint32_t* panel[kTilePanels];
  long steps;  // of K; the last tile may have fewer than sixteen, then zeros
};

// Panels of plain weights, from any step.
struct PlainPanels {
  static constexpr long kRoom = kTilePanels * kTileCells;

  const PackedView& w;
  long first;
  int panels;
  uint32_t* room;

  TileCells next(long from, long end) {
    const uint32_t* cells[kTilePanels];
    for (int p = 0; p < kTilePanels; ++p) cells[p] = w.cells + ((first + p % panels) * w.steps() + from) * 16;
    const long whole = (end - from) / kTileSteps;
    if (whole > 0) return {{cells[0], cells[1]}, min_of(whole, kLongestRun) * kTileSteps};
    __builtin_memset(room, 0, kRoom * 4);
    for (int p = 0; p < panels; ++p)
      __builtin_memcpy(room + p * kTileCells, cells[p], static_cast<size_t>(end - from) * 64);
    return {{room, room + kTileCells}, end - from};
  }
};

// Panels of compressed weights, from the first step to the last.
struct CompressedPanels {
  static constexpr long kPanelRoom = kDecodedTiles * kTileCells;
  static constexpr long kRoom = kTilePanels * kPanelRoom;
  static constexpr long kStepsABlock = kBlockColumns / 2;

  const CompressedView& w;
  long first;
  int panels;
  uint32_t* room;
  const uint8_t* escapes[kTilePanels];

  CompressedPanels(const CompressedView& weight, long panel, int count, uint32_t* cells)
      : w(weight), first(panel), panels(count), room(cells) {
    for (int p = 0; p < panels; ++p) escapes[p] = w.escapes + w.escape_begin[first + p];
  }

  TileCells next(long from, long end) {
    const long steps = min_of(end - from, kDecodedTiles * kTileSteps);
    const long block = from / kStepsABlock, blocks = steps / kStepsABlock;
    for (int p = 0; p < panels; ++p) {
      uint32_t* cells = room + p * kPanelRoom;
      escapes[p] = decode_blocks(w, first + p, block, block + blocks, escapes[p], cells, kDecodedTiles * kTileSteps / kStepsABlock);
      __builtin_memset(cells + steps * 16, 0, static_cast<size_t>(tiles_of(steps) * kTileSteps - steps) * 64);
    }
    return {{room, room + kPanelRoom}, steps};
  }
};

// The shapes of this thread's tiles, from the first use in an item to its end.
class ShapedTiles {
 public:
  ShapedTiles() = default;
  ShapedTiles(const ShapedTiles&) = delete;
  ShapedTiles& operator=(const ShapedTiles&) = delete;
  ~ShapedTiles() {
    if (upper_ != 0) tile_release();
  }

  // For `upper` rows of x, and `lower` below them (or none).
  void shape(int upper, int lower);

 private:
  int upper_ = 0, lower_ = 0;
};

// Sums of the upper rows with the left and the right panel, and of the lower rows; rows of x; panels.
enum TileOf : int { kUpperLeft, kUpperRight, kLowerLeft, kLowerRight, kUpperX, kLowerX, kLeft, kRight };

void ShapedTiles::shape(int upper, int lower) {
  if (upper == upper_ && lower == lower_) return;
  TileShapes shapes;
  for (int tile = 0; tile < kTileRegisters; ++tile)
    shapes.set(tile, tile >= kLeft ? kTileRows : tile == kLowerLeft || tile == kLowerRight || tile == kLowerX ? lower : upper);
  tile_configure(shapes);
  upper_ = upper;
  lower_ = lower;
}

struct TileRun {
  const char* x;  // of the first row and the first tile of K
  size_t row_bytes;
  const uint32_t* left;
  const uint32_t* right;
  long tiles;
  float* sums;  // [rows][panels * 16]
  bool more;    // goes on with these sums, else from zero
};

// One pair of row tiles, or an upper one alone, times two panels, or a left one alone.
template <bool kLower, bool kTwo>
__attribute__((noinline)) void run_tiles(const TileRun& run) {
  constexpr size_t kSums = kTwo ? 2 * 64 : 64;  // bytes of a row of sums
  char* upper = reinterpret_cast<char*>(run.sums);
  char* lower = upper + kTileRows * kSums;
  if (run.more) {
    tile_load<kUpperLeft>(upper, kSums);
    if constexpr (kTwo) tile_load<kUpperRight>(upper + 64, kSums);
    if constexpr (kLower) tile_load<kLowerLeft>(lower, kSums);
    if constexpr (kLower && kTwo) tile_load<kLowerRight>(lower + 64, kSums);
  } else {
    tile_zero<kUpperLeft>();
    if constexpr (kTwo) tile_zero<kUpperRight>();
    if constexpr (kLower) tile_zero<kLowerLeft>();
    if constexpr (kLower && kTwo) tile_zero<kLowerRight>();
  }
  const char* x = run.x;
  const uint32_t *left = run.left, *right = run.right;
  for (long tile = 0; tile < run.tiles; ++tile, x += kTileBytes, left += kTileCells, right += kTileCells) {
    tile_load<kUpperX>(x, run.row_bytes);
    tile_load<kLeft>(left, 64);
    tile_multiply<kUpperLeft, kUpperX, kLeft>();
    if constexpr (kLower) {
      tile_load<kLowerX>(x + kTileRows * run.row_bytes, run.row_bytes);
      tile_multiply<kLowerLeft, kLowerX, kLeft>();
    }
    if constexpr (kTwo) {
      tile_load<kRight>(right, 64);
      tile_multiply<kUpperRight, kUpperX, kRight>();
      if constexpr (kLower) tile_multiply<kLowerRight, kLowerX, kRight>();
    }
  }
  tile_store<kUpperLeft>(upper, kSums);
  if constexpr (kTwo) tile_store<kUpperRight>(upper + 64, kSums);
  if constexpr (kLower) tile_store<kLowerLeft>(lower, kSums);
  if constexpr (kLower && kTwo) tile_store<kLowerRight>(lower + 64, kSums);
}

void run_tiles_of(const TileRun& run, bool lower, bool two) {
  if (lower)
    two ? run_tiles<true, true>(run) : run_tiles<true, false>(run);
  else
    two ? run_tiles<false, true>(run) : run_tiles<false, false>(run);
}

// Rows are cut into blocks of up to `kBlockPairs` pairs of tiles; only the last pair of all is not full.
struct PairCut {
  long rows;

  long pairs() const { return (rows + kPairRows - 1) / kPairRows; }
  long blocks() const { return (pairs() + kBlockPairs - 1) / kBlockPairs; }
  long block_begin(long block) const { return min_of(rows, block * pairs() / blocks() * kPairRows); }
};

// The sums of rows [begin, end) times the panels of `source`: [rows][panels * 16] in the first slot.
template <class Source>
void tile_block(const PackedView& w, const TileInputs& x, long begin, long end, Source& source, float* slots) {
  const long width = source.panels * 16;
  ShapedTiles tiles;
  const Sums sums{slots, (end - begin) * width};
  for (int s = 0; s < w.segments; ++s) {
    long step = w.step_begin[s];
    do {  // once at least: an empty segment is a sum of zero
      const TileCells cells = source.next(step, w.step_begin[s + 1]);
      const long done = step - w.step_begin[s];
      const char* column = x.data + (x.begin[s] + done / kTileSteps) * kTileBytes;
      for (long row = begin; row < end; row += kPairRows) {
        const int upper = static_cast<int>(min_of(kTileRows, end - row));
        const int lower = static_cast<int>(min_of(kTileRows, end - row - upper));
        tiles.shape(upper, lower);
        run_tiles_of({column + static_cast<size_t>(row) * x.row_bytes, x.row_bytes, cells.panel[0], cells.panel[1],
                      tiles_of(cells.steps), sums.of(s) + (row - begin) * width, done != 0},
                     lower != 0, source.panels == kTilePanels);
      }
      step += cells.steps;
    } while (step < w.step_begin[s + 1]);
    sums.close(s);
  }
}

// make(first panel, panels, room) gives a source of tiles.
template <class Source, class Make>
void linear_tiles(const LinearArgs& args, const Make& make) {
  if (args.rows == 0) return;
  const TileInputs x = tile_inputs(args);
  const PairCut cut{args.rows};
  const long panels = panels_to_cut(args);
  const double work = static_cast<double>(args.rows + 4) * static_cast<double>(args.weight.panels() * 16 * args.weight.steps());
  const long each = panels_an_item(panels, kTilePanels, work / static_cast<double>(cut.blocks()));
  const long groups = (panels + each - 1) / each;
  each_item(groups * cut.blocks(), work, [&](long item, int worker) {
    const long begin = cut.block_begin(item / groups), end = cut.block_begin(item / groups + 1);
    const size_t slots = kSlots * static_cast<size_t>(end - begin) * kTilePanels * 16;
    uint32_t* room = static_cast<uint32_t*>(workspace(worker, (Source::kRoom + slots) * 4));
    const long first = item % groups * each, last = min_of(panels, first + each);
    const auto at_once = [&](long panel) { return static_cast<int>(min_of(kTilePanels, last - panel)); };
    const auto sum = [&](const PanelGroup& group, float* to) {
      Source source = make(group.panel, group.panels, room);
      tile_block(args.weight, x, begin, end, source, to);
    };
    each_group<Bf16>(args, first, last, at_once, begin, end - begin, reinterpret_cast<float*>(room + Source::kRoom), sum);
  });
}

// Multiplies two panels with a pair of row tiles `repeats` times on every thread, out of the cache; returns
// floating-point operations done.
double multiply_tiles(long repeats) {
  constexpr long kTiles = 4;
  const long threads = thread_count();
  each_item(threads, 1e9, [&](long, int worker) {
    constexpr size_t kCells = kTilePanels * kTiles * kTileCells, kX = kPairRows * kTiles * kTileBytes;
    constexpr size_t kSums = kPairRows * kTilePanels * 64;
    char* memory = static_cast<char*>(workspace(worker, kCells * 4 + kX + kSums));
    __builtin_memset(memory, 0, kCells * 4 + kX + kSums);
    const uint32_t* cells = reinterpret_cast<const uint32_t*>(memory);
    float* sums = reinterpret_cast<float*>(memory + kCells * 4 + kX);
    const TileRun run{memory + kCells * 4, kTiles * kTileBytes, cells, cells + kTiles * kTileCells, kTiles, sums, true};
    ShapedTiles tiles;
    tiles.shape(kTileRows, kTileRows);
    for (long i = 0; i < repeats; ++i) run_tiles<true, true>(run);
  });
  return 2.0 * static_cast<double>(threads * repeats * kTiles * kPairRows * kTilePanels * 16 * 32);
}

}  // namespace
