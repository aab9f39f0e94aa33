// x W^T over compressed weights, and rows of a compressed table: the bits of gemm/gemm.hpp, lane by lane and step by step.
//
// Up to kMaxRegisterRows rows are multiplied as one tile that decodes in registers (families that can).  More rows, and
// other families: each group of panels is walked slab by slab, once for all rows of a block.
#pragma once

#include "compressed/compressed_tile.hpp"

namespace {

// Equal codes for panels [from, from + count)?
PS_INLINE bool same_code(const CompressedView& w, long from, int count) {
  for (int p = 1; p < count; ++p)
    if (w.codes[from + p].base != w.codes[from].base || w.codes[from + p].step != w.codes[from].step) return false;
  return true;
}

PS_INLINE bool in_registers(long rows) { return kInRegisters && rows <= kMaxRegisterRows; }

struct CompressedCall;
void in_register_panels(const CompressedCall& call, long panel, long end, float* slots);

// One call's operands; what is multiplied in which order follows from `cut` alone.
struct CompressedCall {
  CompressedLinearArgs args;
  LinearArgs plain;  // the same without cells
  RowCut cut;
  Inputs x;
  int wide;   // panels of a group
  long each;  // panels of an item

  long blocks() const { return in_registers(args.rows) ? 1 : cut.blocks(); }
  long panels() const { return panels_to_cut(plain); }
  long groups() const { return (panels() + each - 1) / each; }
  long items() const { return groups() * blocks(); }

  void run(long item, int worker) const {
    const long panel = item % groups() * each, end = min_of(panels(), panel + each);
    void* scratch = workspace(worker, scratch_bytes());
    if (in_registers(args.rows)) {
      in_register_panels(*this, panel, end, static_cast<float*>(scratch));
    } else {
      by_slabs(item / groups(), panel, end, scratch);
    }
  }

  static constexpr size_t kBufferCells = static_cast<size_t>(kSlabPanels) * kSlabCells;  // of one buffer

  // Scratch of one item: two buffers of cells, then the sums.
  size_t scratch_bytes() const {
    const size_t rows = static_cast<size_t>(min_of(args.rows, kRowBlock));
    return (2 * kBufferCells + kSlots * rows * static_cast<size_t>(wide) * 16) * 4;
  }

  // The tiles of a block times the slab at `walk`; together they decode the next one.
  static void multiply_slab(const SlabWalk& walk, const uint32_t* cells, const Inputs& x, const Sums& sums,
                            const BlockTiles& tiles, const Shares& shares, SlabDecoder& next) {
    const Slab& slab = walk.at;
    const long width = slab.group.panels * 16;
    SlabTile tile{cells, (slab.to - slab.from) * 2, nullptr, nullptr, slab.from != walk.segment_begin(),
                  walk.ends_segment() ? sums.lefts(slab.segment) : 0, sums.slot_floats};
    for (long t = 0; t < tiles.count; ++t) {
      const int rows = tiles.rows_of(t);
      tile.x = x.data + tiles.begin[t] * x.row_bytes + slab.from * 2 * rows * 4;
      tile.acc = sums.of(slab.segment) + (tiles.begin[t] - tiles.first()) * width;
      pick_decoding_tile(rows, slab.group.panels)(tile, next, shares.begin[t], shares.begin[t + 1], shares.pace[t]);
    }
  }

  void write_group(float* slots, const BlockTiles& tiles, const Slab& slab) const {
    const int rows = static_cast<int>(tiles.rows()), panels = slab.group.panels;
    if (args.gate == nullptr)
      write_tile(plain, slots, tiles.first(), rows, slab.first, panels);
    else
      write_gated<Bf16>(plain, slots, slots + tiles.rows() * panels * 16, tiles.first(), rows, slab.first, panels);
  }

  // All rows of a block for panels [panel, end).
  void by_slabs(long block, long panel, long end, void* scratch) const {
    uint32_t* buffer[2] = {static_cast<uint32_t*>(scratch), static_cast<uint32_t*>(scratch) + kBufferCells};
    float* const slots = reinterpret_cast<float*>(buffer[1] + kBufferCells);
    const BlockTiles tiles(cut, block);
    SlabDecoder decoder(args.weight);
    Shares shares;
    SlabWalk walk(args.weight.layout, panel, end, wide, args.gate == nullptr ? 0 : panels_to_cut(plain)), ahead = walk;
    decoder.open(walk.at, buffer[0]);
    decoder.decode_all();
    for (; !walk.done(); walk.at = ahead.at) {
      const uint32_t* cells = buffer[0];
      buffer[0] = buffer[1];
      buffer[1] = const_cast<uint32_t*>(cells);
      ahead.next();
      if (!ahead.done()) decoder.open(ahead.at, buffer[0]);
      shares.cut(tiles.count, ahead.done() ? 0 : decoder.runs(), (walk.at.to - walk.at.from) * 2);
      const long slot_floats = tiles.rows() * walk.at.group.panels * 16;
      const Sums sums{walk.at_counterpart() ? slots + slot_floats : slots, slot_floats};
      multiply_slab(walk, cells, x, sums, tiles, shares, decoder);
      if (walk.ends_group()) write_group(slots, tiles, walk.at);
    }
  }
};

#if defined(__AVX512VBMI2__)
// All rows, at most kMaxRegisterRows, for panels [panel, end).
void in_register_panels(const CompressedCall& call, long panel, long end, float* slots) {
  const CompressedView& w = call.args.weight;
  const long rows = call.args.rows, other = call.args.gate == nullptr ? 0 : panels_to_cut(call.plain);
  const auto at_once = [&](long from) {
    return from + call.wide <= end && same_code(w, from, call.wide) && same_code(w, from + other, call.wide) ? call.wide : 1;
  };
  const auto sum = [&](const PanelGroup& group, float* to) {
    const RegisterTileFn run = pick_register_tile(rows, group.panels);
    const Sums sums{to, rows * group.panels * 16};
    const uint8_t* escapes[kMaxPanels];
    for (int p = 0; p < group.panels; ++p) escapes[p] = w.escapes + w.escape_begin[group.panel + p];
    for (int s = 0; s < w.layout.segments; ++s) {
      run(w, group, w.layout.k_begin[s] / kBlockColumns, w.layout.k_begin[s + 1] / kBlockColumns, call.x, escapes, sums.of(s));
      sums.close(s);
    }
  };
  each_group<Bf16>(call.plain, panel, end, at_once, 0, rows, slots, sum);
}
#else
void in_register_panels(const CompressedCall&, long, long, float*) {}
#endif

// As few rows as fit one tile in registers are taken where they lie; else they lie side by side, as one tile if all go
// through registers.
PS_INLINE bool registers_take(const LinearArgs& args) { return in_registers(args.rows) && args.rows < kPackedFrom; }
PS_INLINE size_t packed_bytes(const LinearArgs& args) {
  return registers_take(args) ? 0 : args.rows * packed_row_bytes(args.weight);
}

void pack_call(const CompressedCall& call) {
  if (!call.x.packed) return;
  char* packed = const_cast<char*>(call.x.data);
  if (in_registers(call.args.rows))
    return pack_inputs<Bf16>(call.plain, 0, static_cast<int>(call.args.rows), reinterpret_cast<uint32_t*>(packed));
  for (long block = 0; block < call.cut.blocks(); ++block)
    pack_block<Bf16>(call.plain, call.cut, block, packed);
}

// The call with its inputs packed at `packed`, which is still to be done.
CompressedCall prepared(const CompressedLinearArgs& args, char* packed) {
  const LinearArgs plain = as_plain(args);
  const bool given = registers_take(plain);
  const Inputs x{given ? static_cast<const char*>(args.x) : packed, !given, packed_row_bytes(plain.weight)};
  const int wide = in_registers(args.rows) ? register_panels(static_cast<int>(args.rows)) : kSlabPanels;
  return {args, plain, RowCut{args.rows}, x, wide, 0};
}

void linear_compressed(const CompressedLinearArgs& args) {
  if (args.rows == 0) return;
  const size_t bytes = packed_bytes(as_plain(args));
  CompressedCall call = prepared(args, bytes == 0 ? nullptr : static_cast<char*>(shared_workspace(bytes)));
  if (in_registers(args.rows)) {
    pack_call(call);
  } else {
    call.x = pack_all_inputs<Bf16>(call.plain, call.cut);
  }
  const double work = product_work(args.rows, args.weight.layout);
  call.each = panels_an_item(call.panels(), call.wide, work / static_cast<double>(call.blocks()));
  each_item(call.items(), work, [&](long item, int worker) { call.run(item, worker); });
}

void linear_group_compressed(const CompressedGroup& group) {
  double work = 0;
  size_t bytes = 0;
  for (long i = 0; i < group.count; ++i) {
    work += product_work(group.calls[i].rows, group.calls[i].weight.layout);
    bytes += packed_bytes(as_plain(group.calls[i]));
  }
  using Calls = CallList<CompressedCall>;
  const Calls list(static_cast<char*>(shared_workspace(Calls::bytes(group.count) + bytes)), group.count);
  char* packed = list.behind();
  for (long i = 0; i < group.count; ++i) {
    const PackedView& layout = group.calls[i].weight.layout;
    CompressedCall& call = list.calls[i];
    call = prepared(group.calls[i], packed);
    const double own = product_work(call.args.rows, layout) / static_cast<double>(call.blocks());
    call.each = panels_of_share(call.panels(), call.wide, own, work);
    packed += packed_bytes(call.plain);
  }
  each_item(group.count, static_cast<double>(bytes), [&](long i, int) { pack_call(list.calls[i]); });
  list.run(work);
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
    escapes = decode_blocks(w, panel, from, to, escapes, cells, kSlabBlocks);
    const long columns = min_of(kChunkBlocks * kBlockColumns, k - column);
    for (long lane = 0; lane < rows; ++lane) {
      uint32_t line[kChunkBlocks * 2];
      for (int step = 0; step < kChunkBlocks * 2; ++step) line[step] = cells[step * 16 + lane];
      __builtin_memcpy(out + lane * k + column, line, static_cast<size_t>(columns) * 2);
    }
  }
}

// Blocks lie as cells do where every segment is one of whole blocks, which the caller has checked.  Outputs that fill up
// the last panel are zeros, as in plain weights.
void decode_cells(const CompressedView& w, long panel, uint32_t* out) {
  const long blocks = w.blocks_a_panel(), rows = min_of(16, w.layout.n - panel * 16);
  decode_blocks(w, panel, 0, blocks, w.escapes + w.escape_begin[panel], out, kSlabBlocks);
  for (long step = 0; rows < 16 && step < blocks * 2; ++step)
    for (long lane = rows; lane < 16; ++lane) out[step * 16 + lane] = 0;
}

}  // namespace
