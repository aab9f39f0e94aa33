// x W^T over compressed weights, and rows of a compressed table: the bits of gemm.hpp, lane by lane and step by step.
//
// Few rows: blocks are decoded in registers, in front of the multiplication (families that can).  Many rows, and other
// families: some steps of a group of panels are decoded to a buffer that stays in the first-level cache, where the
// tiles of plain weights multiply all rows of a block with them.
#pragma once

#include "decode.hpp"
#include "gemm.hpp"

namespace {

constexpr long kBufferBlocks = 32;       // of one panel, decoded at a time
constexpr long kFetchBlocks = 96;         // blocks of all panels together between asking for one and decoding it
constexpr int kMaxRegisterRows = 16;

constexpr int kPackedFrom = 5;  // rows from which the addresses of rows apart would need too many registers

constexpr int register_panels(int rows) { return rows <= 4 ? 4 : rows <= 8 ? 3 : 1; }

// Sums of one group of panels, in the slots of a binary tree over segments (as linear_block in gemm.hpp).
struct Sums {
  float* slots;
  long slot_floats;
  int open = 0;

  float* own() const { return slots + open * slot_floats; }
  void close(int segment) {
    ++open;
    for (int left = segment; left & 1; left >>= 1) {
      --open;
      add_into(slots + (open - 1) * slot_floats, slots + open * slot_floats, slot_floats);
    }
  }
};

// The same product for what does not look at cells.
PS_INLINE LinearArgs as_plain(const CompressedLinearArgs& args) {
  return {args.x, args.rows, args.weight.layout, args.out, args.add, args.picks, args.stored};
}

// Equal codes for panels [from, from + count)?
PS_INLINE bool same_code(const CompressedView& w, long from, int count) {
  for (int p = 1; p < count; ++p)
    if (w.codes[from + p].base != w.codes[from].base || w.codes[from + p].step != w.codes[from].step) return false;
  return true;
}

#if defined(__AVX512VBMI2__)
#define PS_REGISTER_ROWS _Pragma("GCC unroll 16") for (int m = 0; m < M; ++m)

// Blocks [from, to) of P panels times M rows of x, from zero; acc [M][P * 16].
template <int M, int P>
__attribute__((noinline)) void register_tile(const CompressedView& w, long panel, long from, long to, const Inputs& inputs,
                                             const uint8_t** escapes, float* sums) {
  const CodeRegs code(w.codes[panel]);
  const long panel_bytes = w.blocks_a_panel() * kBlockBytes;
  F16 acc[M][P];
  PS_REGISTER_ROWS PS_PANELS acc[m][p] = splat(0.0f);
  const uint8_t* escape[P];
  PS_PANELS escape[p] = escapes[p];
  TileArgs tile;
  inputs.place(tile, 0, M, from * 2);
  const char* x = tile.x;
  const size_t x_stride = M < kPackedFrom ? tile.x_stride : 4, x_step = M < kPackedFrom ? tile.x_step : M * 4;
  while (from < to) {
    BlockRef block = w.block(panel, from);
    const long next = (from / kChunkBlocks + 1) * kChunkBlocks, end = next < to ? next : to;
    const long ahead = from + kFetchBlocks / P;  // behind the end of these panels begin the next P
    const uint8_t* chunk_ahead = w.panel(panel) + ahead * kBlockBytes + (ahead < w.blocks_a_panel() ? 0 : (P - 1) * panel_bytes);
    Fetcher fetch(chunk_ahead);
    _Pragma("GCC unroll 8") for (int p = 1; p < P; ++p) Fetcher(chunk_ahead + p * panel_bytes);
    PS_PANELS __builtin_prefetch(escape[p] + 128, 0, 3);
    for (; from < end; ++from, x += 2 * x_step) {
      U16 cells[2][P];
      PS_PANELS {
        const BlockRef own{block.planes + p * panel_bytes, block.bytes + p * panel_bytes};
        decode_block(own, code, escape[p], cells[0][p], cells[1][p]);
        fetch.one_block(p * panel_bytes);
      }
      _Pragma("GCC unroll 2") for (int step = 0; step < 2; ++step) PS_REGISTER_ROWS {
        const uint32_t value = load_cell(x + m * x_stride + step * x_step);
        PS_PANELS acc[m][p] = dot_cells<Bf16>(acc[m][p], cells[step][p], value);
      }
      block.planes += kPlaneBytes;
      block.bytes += kMantissaBytes;
      fetch.next_block();
    }
  }
  PS_PANELS escapes[p] = escape[p];
  PS_REGISTER_ROWS PS_PANELS store(sums + (m * P + p) * 16, acc[m][p]);
}

using RegisterTileFn = void (*)(const CompressedView&, long, long, long, const Inputs&, const uint8_t**, float*);

template <int P, int M>
RegisterTileFn pick_register_rows(long rows) {
  if (rows == M) return register_tile<M, P>;
  if constexpr (M > 1) return pick_register_rows<P, M - 1>(rows);
  return nullptr;
}

RegisterTileFn pick_register_tile(long rows, int panels) {
  switch (panels) {
    case 4: return pick_register_rows<4, 4>(rows);
    case 3: return pick_register_rows<3, 8>(rows);
    default: return pick_register_rows<1, kMaxRegisterRows>(rows);
  }
}

void register_panels_block(const CompressedLinearArgs& args, const Inputs& x, long panel, int panels, float* slots) {
  const PackedView& layout = args.weight.layout;
  Sums sums{slots, args.rows * panels * 16};
  const uint8_t* escapes[kMaxPanels];
  for (int p = 0; p < panels; ++p) escapes[p] = args.weight.escapes + args.weight.escape_begin[panel + p];
  const RegisterTileFn run = pick_register_tile(args.rows, panels);
  for (int s = 0; s < layout.segments; ++s) {
    run(args.weight, panel, layout.k_begin[s] / kBlockColumns, layout.k_begin[s + 1] / kBlockColumns,
        x, escapes, sums.own());
    sums.close(s);
  }
  write_tile(as_plain(args), slots, 0, static_cast<int>(args.rows), panel, panels);
}
#endif

// All rows of a block for `panels` panels, by way of `cells`: room for panels * kBufferBlocks blocks.
void buffered_block(const CompressedLinearArgs& args, const LinearArgs& plain, const Inputs& x, const RowCut& cut,
                    long row_block, long panel, int panels, float* slots, uint32_t* cells) {
  const CompressedView& w = args.weight;
  const PackedView& layout = w.layout;
  const long tiles = cut.tiles(row_block), first = cut.block_begin(row_block);
  Sums sums{slots, (cut.block_begin(row_block + 1) - first) * panels * 16};
  const uint8_t* escapes[kMaxPanels];
  TileArgs tile{};
  tile.base[0] = cells;
  tile.bases = 1;
  tile.step_stride = 16;
  tile.acc_stride = static_cast<size_t>(panels) * 16;
  for (int p = 0; p < panels; ++p) {
    tile.offset[p] = p * kBufferBlocks * 32;
    escapes[p] = w.escapes + w.escape_begin[panel + p];
  }
  for (int s = 0; s < layout.segments; ++s) {
    const long begin = layout.k_begin[s] / kBlockColumns, end = layout.k_begin[s + 1] / kBlockColumns;
    long from = begin;
    do {  // once at least: an empty segment is a sum of zero
      const long to = min_of(from + kBufferBlocks, end);
      for (int p = 0; p < panels; ++p)
        escapes[p] = decode_blocks(w, panel + p, from, to, escapes[p], cells + p * kBufferBlocks * 32, kBufferBlocks);
      tile.steps = (to - from) * 2;
      for (long t = 0; t < tiles; ++t) {
        const long row = cut.tile_begin(row_block, t);
        const int rows = static_cast<int>(cut.tile_begin(row_block, t + 1) - row);
        x.place(tile, row, rows, from * 2);
        tile.acc = sums.own() + (row - first) * panels * 16;
        pick_tile<Bf16, Fetch::kNothing>(rows, panels)(tile, from != begin);
      }
      from = to;
    } while (from < end);
    sums.close(s);
  }
  for (long t = 0; t < tiles; ++t) {
    const long row = cut.tile_begin(row_block, t);
    const int rows = static_cast<int>(cut.tile_begin(row_block, t + 1) - row);
    write_tile(plain, slots + (row - first) * panels * 16, row, rows, panel, panels);
  }
}

// All rows as one tile, side by side from `kPackedFrom` on.
Inputs register_inputs(const LinearArgs& args) {
  const size_t row_bytes = static_cast<size_t>(args.weight.steps()) * 4;
  if (args.rows < kPackedFrom) return {static_cast<const char*>(args.x), false, row_bytes};
  char* packed = static_cast<char*>(shared_workspace(args.rows * row_bytes));
  pack_inputs<Bf16>(args, 0, static_cast<int>(args.rows), reinterpret_cast<uint32_t*>(packed));
  return {packed, true, row_bytes};
}

void linear_compressed(const CompressedLinearArgs& args) {
  if (args.rows == 0) return;
  const RowCut cut{args.rows};
  const PackedView& layout = args.weight.layout;
  const LinearArgs plain = as_plain(args);
  const bool in_registers = kInRegisters && args.rows <= kMaxRegisterRows;
  const Inputs x = in_registers ? register_inputs(plain) : prepare_inputs<Bf16>(plain, cut);
  const int wide = in_registers ? register_panels(static_cast<int>(args.rows))
                                : panels_at_once(static_cast<int>(cut.largest_tile()));
  const long panels = layout.panels();
  const double work = static_cast<double>(args.rows + 4) * static_cast<double>(panels * 16 * layout.steps());
  const long blocks = in_registers ? 1 : cut.blocks();
  const long each = panels_an_item(panels, wide, work / static_cast<double>(blocks));
  const long groups = (panels + each - 1) / each;
  each_item(groups * blocks, work, [&](long item, int worker) {
    const long block = item / groups, group = item % groups;
    const size_t rows = static_cast<size_t>(cut.block_begin(block + 1) - cut.block_begin(block));
    const size_t cells = static_cast<size_t>(wide * kBufferBlocks) * 32, slots = kTreeSlots * rows * wide * 16;
    uint32_t* room = static_cast<uint32_t*>(workspace(worker, (cells + slots) * 4));
    float* sums = reinterpret_cast<float*>(room + cells);
    const long end = min_of(panels, (group + 1) * each);
    for (long panel = group * each; panel < end;) {
      int count = panel + wide <= end ? wide : 1;
#if defined(__AVX512VBMI2__)
      if (in_registers) {
        if (!same_code(args.weight, panel, count)) count = 1;
        register_panels_block(args, x, panel, count, sums);
        panel += count;
        continue;
      }
#endif
      buffered_block(args, plain, x, cut, block, panel, count, sums, room);
      panel += count;
    }
  });
}

// The weights of one output in one block, to out[4].
PS_INLINE void decode_output(const BlockRef& block, const PanelCode& code, int lane, const uint8_t* escapes,
                             float* out) {
  const uint64_t escaped = escapes_of(block.planes);
  for (int c = 0; c < kBlockColumns; ++c) {
    const int i = lane / 4 * 16 + c / 2 * 8 + lane % 4 * 2 + c % 2;
    unsigned exponent = code.base ^ (load_word(block.planes) >> i & 1) << 7;
    exponent += static_cast<unsigned>(load_word(block.planes + 8) >> i & 1) * code.step;
    exponent += static_cast<unsigned>(load_word(block.planes + 16) >> i & 1) * 2 * code.step;
    if (escaped >> i & 1) exponent = escapes[__builtin_popcountll(escaped & ((uint64_t{1} << i) - 1))];
    const unsigned byte = block.bytes[i];
    const uint32_t bits = ((exponent & 0x80) | (byte & 0x7F) | (exponent & 0x7F) << 8 | (byte & 0x80) << 8) << 16;
    __builtin_memcpy(out + c, &bits, 4);
  }
}

void embed_compressed(const CompressedEmbedArgs& args) {
  const CompressedView& w = args.table;
  const long k = w.layout.k;
  each_item(args.rows, static_cast<double>(args.rows) * static_cast<double>(k) * 8, [&](long row, int) {
    const long panel = args.tokens[row] / 16;
    const uint8_t* escapes = w.escapes + w.escape_begin[panel];
    float* to = args.out + row * k;
    for (long b = 0; b < w.blocks_a_panel(); ++b) {
      const BlockRef block = w.block(panel, b);
      decode_output(block, w.codes[panel], args.tokens[row] % 16, escapes, to + b * kBlockColumns);
      escapes += __builtin_popcountll(escapes_of(block.planes));
    }
  });
}

void decode_rows(const CompressedView& w, long panel, uint16_t* out) {
  const long k = w.layout.k, rows = min_of(16, w.layout.n - panel * 16), blocks = w.blocks_a_panel();
  const uint8_t* escapes = w.escapes + w.escape_begin[panel];
  alignas(64) uint32_t cells[kChunkBlocks * 32];
  for (long from = 0; from < blocks; from += kChunkBlocks) {
    const long to = min_of(from + kChunkBlocks, blocks), column = from * kBlockColumns;
    escapes = decode_blocks(w, panel, from, to, escapes, cells, kBufferBlocks);
    const long columns = min_of(kChunkBlocks * kBlockColumns, k - column);
    for (long lane = 0; lane < rows; ++lane) {
      uint32_t line[kChunkBlocks * 2];
      for (int step = 0; step < kChunkBlocks * 2; ++step) line[step] = cells[step * 16 + lane];
      __builtin_memcpy(out + lane * k + column, line, static_cast<size_t>(columns) * 2);
    }
  }
}

}  // namespace
