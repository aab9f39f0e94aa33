// Tiles whose weights are compressed.
//
// Few rows: blocks are decoded in registers, in front of the multiplication (families that can).  More rows: a slab of
// blocks lies decoded in a buffer, and while the tiles of all rows are multiplied with it they decode the next slab
// into another one.  So a block is decoded once for all rows, and beside multiplications, which leave half of the
// vector pipes free.
#pragma once

#include "decode.hpp"
#include "gemm.hpp"

namespace {

constexpr long kFetchBlocks = 96;  // blocks of all panels together between asking for one and decoding it
constexpr int kMaxRegisterRows = 16;
constexpr int kPackedFrom = 5;  // rows from which the addresses of rows apart would need too many registers

constexpr int register_panels(int rows) { return rows <= 4 ? 4 : rows <= 8 ? 3 : 1; }

#if defined(__AVX512VBMI2__)
#define PS_REGISTER_ROWS _Pragma("GCC unroll 16") for (int m = 0; m < M; ++m)

// Blocks [from, to) of P panels times M rows of x, from zero; acc [M][P * 16].
template <int M, int P>
__attribute__((noinline)) void register_tile(const CompressedView& w, long panel, long from, long to,
                                             const Inputs& inputs, const uint8_t** escapes, float* sums) {
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
    const long jump = ahead < w.blocks_a_panel() ? 0 : (P - 1) * panel_bytes;
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
#endif

// Blocks [from, to) of `panels` panels, inside one segment.
struct Slab {
  long panel;
  int panels;
  int segment;
  long from;
  long to;
};

constexpr long kSlabBlocks = 64;
constexpr long kSlabCells = kSlabBlocks * 32;  // of one panel

// The slabs of panels [panel, end): `wide` panels at a time while there are so many, segment by segment.
struct SlabWalk {
  const PackedView& layout;
  long end;
  int wide;
  Slab at;

  SlabWalk(const PackedView& own, long panel, long last, int panels) : layout(own), end(last), wide(panels), at{} {
    at.panel = panel;
    begin_group();
  }

  bool done() const { return at.panel >= end; }
  long segment_begin() const { return layout.k_begin[at.segment] / kBlockColumns; }
  bool ends_segment() const { return at.to == layout.k_begin[at.segment + 1] / kBlockColumns; }
  bool ends_group() const { return ends_segment() && at.segment + 1 == layout.segments; }

  void begin_group() {
    at.panels = at.panel + wide <= end ? wide : 1;
    at.segment = 0;
    begin_slab(0);
  }
  void begin_slab(long from) {
    at.from = from;
    at.to = min_of(from + kSlabBlocks, layout.k_begin[at.segment + 1] / kBlockColumns);
  }
  void next() {
    if (ends_group()) {
      at.panel += at.panels;
      begin_group();
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

  explicit SlabDecoder(const CompressedView& weight) : w(weight), slab{}, cells(nullptr), escapes{} { slab.panel = -1; }

  // `to`: room for panels * kSlabCells.
  void open(const Slab& next, uint32_t* to) {
    if (next.panel != slab.panel)
      for (int p = 0; p < next.panels; ++p) {
        escapes[p] = w.escapes + w.escape_begin[next.panel + p];
        codes[p] = CodeRegs(w.codes[next.panel + p]);
      }
    slab = next;
    cells = to;
  }

  long runs_a_panel() const {
    return slab.from < slab.to ? (slab.to - 1) / kChunkBlocks - slab.from / kChunkBlocks + 1 : 0;
  }
  long runs() const { return slab.panels * runs_a_panel(); }

  // Blocks of all runs before this one.
  long blocks_before(long run) const {
    if (run == 0) return 0;
    const long panel = run / runs_a_panel(), inside = run % runs_a_panel();
    const long chunk = (slab.from / kChunkBlocks + inside) * kChunkBlocks;
    return panel * (slab.to - slab.from) + (inside == 0 ? 0 : chunk - slab.from);
  }

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
    const long ahead = chunk + kSlabBlocks;  // behind the end of these panels begins the next group
    const long jump = ahead < w.blocks_a_panel() ? 0 : (slab.panels - 1) * panel_bytes;
    return {w.block(slab.panel + p, begin),
            min_of(chunk + kChunkBlocks, slab.to) - begin,
            &codes[p],
            &escapes[p],
            cells + p * kSlabCells + (begin - slab.from) * 32,
            w.panel(slab.panel + p) + ahead * kBlockBytes + jump};
  }
};

// The present slab's part in a tile: cells at `cells`, one panel kSlabCells behind the other; x side by side.
struct SlabTile {
  const uint32_t* cells;
  long steps;
  const char* x;
  float* acc;  // [rows][panels * 16]
  bool resume;
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
    for (; cells != stop; cells += 16, x += M * 4) multiply_step<Bf16, M, P>(acc, cells, offset, x, 4);
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
  PS_ROWS PS_PANELS store(tile.acc + (m * P + p) * 16, acc[m][p]);
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
