// Tiles whose weights are compressed.
//
// Few rows: blocks are decoded in registers, in front of the multiplication (families that can).  More rows: a slab of
// blocks lies decoded in a buffer, and while the tiles of all rows are multiplied with it they decode the next slab
// into another one.  So a block is decoded once for all rows, and during multiplications, which leave half of the
// vector pipes free.
#pragma once

#include "compressed/compressed_decode.hpp"
#include "gemm/gemm.hpp"

namespace {

constexpr long kFetchBlocks = 96;  // blocks of all panels together between asking for one and decoding it
constexpr int kMaxRegisterRows = 16;
constexpr int kPackedFrom = 5;  // rows from which the addresses of rows apart would need too many registers

constexpr int register_panels(int rows) { return rows <= 4 ? 4 : rows <= 8 ? 3 : 1; }

#if defined(__AVX512VBMI2__)
#define PS_REGISTER_ROWS _Pragma("GCC unroll 16") for (int m = 0; m < M; ++m)

// Blocks [from, to) of P panels times M rows of x, from zero; acc [M][P * 16].
template <int M, int P>
__attribute__((noinline)) void register_tile(const CompressedView& w, const PanelGroup& group, long from, long to,
                                             const Inputs& inputs, const uint8_t** escapes, float* sums) {
  const long panel = group.panel;
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
    const long ahead = from + kFetchBlocks / P;
    const long jump = ahead < w.blocks_a_panel() ? 0 : (group.next - panel - 1) * panel_bytes;
    const uint8_t* chunk_ahead = w.panel(panel) + ahead * kBlockBytes + jump;
    Fetcher<3> fetch(chunk_ahead);
    _Pragma("GCC unroll 8") for (int p = 1; p < P; ++p) Fetcher<3>(chunk_ahead + p * panel_bytes);
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

using RegisterTileFn = void (*)(const CompressedView&, const PanelGroup&, long, long, const Inputs&, const uint8_t**, float*);

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
#endif

// Blocks [from, to) of a group of panels, inside one segment.
struct Slab {
  long first;  // panel of the group; a gate's, whose counterpart may be what is summed
  PanelGroup group;
  int segment;
  long from;
  long to;
};

constexpr long kSlabBlocks = 64;
constexpr long kSlabCells = kSlabBlocks * 32;  // of one panel

// The slabs of panels [panel, end): `wide` panels at a time while enough are left, segment by segment.  With a gate
// each group is followed by its counterpart, `apart` panels behind it.
struct SlabWalk {
  const PackedView& layout;
  long end;
  int wide;
  long apart;  // 0: no gate
  Slab at{};

  SlabWalk(const PackedView& own, long panel, long last, int panels, long gap)
      : layout(own), end(last), wide(panels), apart(gap) {
    begin_group(panel);
  }

  bool done() const { return at.first >= end; }
  long segment_begin() const { return layout.k_begin[at.segment] / kBlockColumns; }
  bool ends_segment() const { return at.to == layout.k_begin[at.segment + 1] / kBlockColumns; }
  bool ends_panels() const { return ends_segment() && at.segment + 1 == layout.segments; }
  bool at_counterpart() const { return at.group.panel != at.first; }
  bool ends_group() const { return ends_panels() && (apart == 0 || at_counterpart()); }

  void begin_group(long panel) {
    const int panels = panel + wide <= end ? wide : 1;
    at.first = panel;
    at.group = {panel, panels, apart != 0 ? panel + apart : panel + panels};
    at.segment = 0;
    begin_slab(0);
  }
  void begin_counterpart() {
    at.group = {at.first + apart, at.group.panels, at.first + at.group.panels};
    at.segment = 0;
    begin_slab(0);
  }
  void begin_slab(long from) {
    at.from = from;
    at.to = min_of(from + kSlabBlocks, layout.k_begin[at.segment + 1] / kBlockColumns);
  }
  void next() {
    if (ends_group()) {
      begin_group(at.first + at.group.panels);
    } else if (ends_panels()) {
      begin_counterpart();
    } else {
      at.segment += ends_segment();
      begin_slab(at.to);
    }
  }
};

// Blocks of one chunk of one panel, and where they go.
struct Run {
  BlockRef block;
  long blocks;
  const CodeRegs* code;
  const uint8_t** escapes;
  uint32_t* cells;
  const uint8_t* ahead;  // what is as far in the slab behind this one

  PS_INLINE void next_block() {
    block.planes += kPlaneBytes;
    block.bytes += kMantissaBytes;
    cells += 32;
  }
};

// Decodes a slab in runs: panel after panel, from the first block to the last.
struct SlabDecoder {
  const CompressedView& w;
  Slab slab;
  uint32_t* cells;
  const uint8_t* escapes[kMaxPanels];
  CodeRegs codes[kMaxPanels];

  explicit SlabDecoder(const CompressedView& weight) : w(weight), slab{}, cells(nullptr), escapes{} { slab.group.panel = -1; }

  // `to`: room for panels * kSlabCells.
  void open(const Slab& next, uint32_t* to) {
    const long panel = next.group.panel;
    if (panel != slab.group.panel)
      for (int p = 0; p < next.group.panels; ++p) {
        escapes[p] = w.escapes + w.escape_begin[panel + p];
        codes[p] = CodeRegs(w.codes[panel + p]);
      }
    slab = next;
    cells = to;
  }

  long runs_a_panel() const {
    return slab.from < slab.to ? (slab.to - 1) / kChunkBlocks - slab.from / kChunkBlocks + 1 : 0;
  }
  long runs() const { return slab.group.panels * runs_a_panel(); }

  void decode_all() {
    for (long index = 0; index < runs(); ++index) {
      Run own = run(index);
      const uint8_t* next = *own.escapes;
      for (; own.blocks > 0; --own.blocks) {
        decode_to(own.block, *own.code, next, own.cells);
        own.next_block();
      }
      *own.escapes = next;
    }
  }

  Run run(long index) {
    const long p = index / runs_a_panel(), chunk = (slab.from / kChunkBlocks + index % runs_a_panel()) * kChunkBlocks;
    const long begin = chunk > slab.from ? chunk : slab.from, panel_bytes = w.blocks_a_panel() * kBlockBytes;
    const long ahead = chunk + kSlabBlocks, panel = slab.group.panel;
    const long jump = ahead < w.blocks_a_panel() ? 0 : (slab.group.next - panel - 1) * panel_bytes;
    return {w.block(panel + p, begin),
            min_of(chunk + kChunkBlocks, slab.to) - begin,
            &codes[p],
            &escapes[p],
            cells + p * kSlabCells + (begin - slab.from) * 32,
            w.panel(panel + p) + ahead * kBlockBytes + jump};
  }
};

// What each tile of a block decodes of the next slab: runs [begin[t], begin[t + 1]), with `pace[t]` steps after each block.
struct Shares {
  long runs = -1;
  long steps = 0;
  long begin[kRowBlock / kMaxRows + 1];
  long pace[kRowBlock / kMaxRows];

  void cut(long tiles, long all_runs, long all_steps) {
    if (runs == all_runs && steps == all_steps) return;
    runs = all_runs;
    steps = all_steps;
    for (long t = 0; t <= tiles; ++t) begin[t] = t * runs / tiles;
    for (long t = 0; t < tiles; ++t)
      pace[t] = begin[t] == begin[t + 1] ? 0 : steps / ((begin[t + 1] - begin[t]) * kChunkBlocks);
  }
};

// The present slab's part in a tile: cells at `cells`, one panel kSlabCells behind the other; x side by side.
struct SlabTile {
  const uint32_t* cells;
  long steps;
  const char* x;
  float* acc;  // [rows][panels * 16]
  bool resume;
  int lefts;  // as in TileArgs
  long left_stride;
};

// acc (or zero) += cells . x, while runs [run, last) of another slab are decoded: after each block come `pace` steps.
template <int M, int P>
__attribute__((noinline)) void decoding_tile(const SlabTile& tile, SlabDecoder& decoder, long run, long last,
                                             long pace) {
  F16 acc[M][P];
  if (tile.resume) {
    PS_ROWS PS_PANELS acc[m][p] = load(tile.acc + (m * P + p) * 16);
  } else {
    PS_ROWS PS_PANELS acc[m][p] = splat(0.0f);
  }
  ptrdiff_t offset[P];
  PS_PANELS offset[p] = p * kSlabCells;
  const uint32_t* cells = tile.cells;
  const char* x = tile.x;
  const uint32_t* const end = cells + tile.steps * 16;
  const auto steps_to = [&](const uint32_t* stop) __attribute__((always_inline)) {
    for (; cells != stop; cells += 16, x += M * 4) {
      multiply_step<Bf16, M, P>(acc, cells, offset, x, 4);
      __builtin_prefetch(x + kSlabBlocks * 2 * M * 4, 0, 2);  // what this tile multiplies with the next slab
    }
  };
  for (; run < last; ++run) {
    Run own = decoder.run(run);
    Fetcher<2> fetch(own.ahead);
    const uint8_t* escapes = *own.escapes;
    __builtin_prefetch(escapes + 128, 0, 3);
    const CodeRegs* code = own.code;
    for (long b = 0; b < own.blocks; ++b) {
      asm("" : "+r"(code));  // read from memory each time: sums need the registers
      decode_to(own.block, *code, escapes, own.cells);
      fetch.one_block();
      fetch.next_block();
      own.next_block();
      steps_to(cells + pace * 16);
    }
    *own.escapes = escapes;
  }
  steps_to(end);
  store_sums<M, P>(acc, tile.acc, P * 16, tile.lefts, tile.left_stride);
}

using DecodingTileFn = void (*)(const SlabTile&, SlabDecoder&, long, long, long);

template <int P, int M>
DecodingTileFn pick_decoding_rows(int rows) {
  if (rows == M) return decoding_tile<M, P>;
  if constexpr (M > 1) return pick_decoding_rows<P, M - 1>(rows);
  return nullptr;
}

// The tile of at most kMaxRows rows by 1 or kSlabPanels panels.
constexpr int kSlabPanels = panels_at_once(kMaxRows);

DecodingTileFn pick_decoding_tile(int rows, int panels) {
  if (panels == kSlabPanels) return pick_decoding_rows<kSlabPanels, kMaxRows>(rows);
  return pick_decoding_rows<1, kMaxRows>(rows);
}

}  // namespace
