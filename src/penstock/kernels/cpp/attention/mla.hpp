// Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) around the attention itself: what is written of a token,
// what becomes of its queries, and products that every head has for itself.
#pragma once

#include "attention/rope.hpp"

namespace {

template <class D>
void latent_write_typed(const LatentWriteArgs& args) {
  using Value = typename D::Value;
  const long key_dim = args.kv.key_dim, plain = args.kv.value_dim;
  each_row(args.batch.tokens, key_dim, static_cast<double>(args.batch.tokens * key_dim) * 4, [&](long token, int) {
    const long position = args.batch.positions[token];
    const int32_t* table = args.batch.table + args.sequence_of[token] * args.batch.table_width;
    const float* x = args.latent + token * key_dim;
    alignas(64) float made[kMaxHeadDim];
    alignas(64) Value rounded[kMaxHeadDim];
    const F16 inverse = inverse_rms(x, plain, args.eps);
    for (long i = 0; i < plain; i += 16) {
      const int count = static_cast<int>(min_of(16, plain - i));
      store_part(made + i, load_part<F16>(x + i, count) * inverse * load_part<F16>(args.weight + i, count), count);
    }
    Turn<false>(args.rope, position, key_dim - plain)(x + plain, made + plain);
    to_compute_typed<D>(made, key_dim, rounded);
    write_key<D>(reinterpret_cast<Value*>(args.kv.keys(table[position / kPageTokens], args.layer, 0)), rounded, key_dim,
                 position % kPageTokens);
  });
}

template <class D>
void latent_split_typed(const LatentSplitArgs& args) {
  using Value = typename D::Value;
  const long turned_dim = 2 * args.rope.pairs, width = args.plain + turned_dim;
  const double work = static_cast<double>(args.batch.tokens * args.heads * width) * 4;
  each_row(args.batch.tokens, args.heads * width, work, [&](long token, int) {
    const Turn<false> turn(args.rope, args.batch.positions[token], turned_dim);
    alignas(64) float turned[kMaxHeadDim];
    for (long head = token * args.heads; head < (token + 1) * args.heads; ++head) {
      const float* q = args.q + head * width;
      to_compute_typed<D>(q, args.plain, static_cast<Value*>(args.x) + head * args.plain);
      turn(q + args.plain, turned);
      to_compute_typed<D>(turned, turned_dim, static_cast<Value*>(args.turned) + (head + 1) * args.key_dim - turned_dim);
    }
  });
}

// One head's outputs of a tile of rows: lanes [from, to) of `panels` panels, of which lane `from` is column 0 of out.
template <class D>
void store_head(const float* sums, int rows, long panels, long from, long to, typename D::Value* out, long stride) {
  for (int m = 0; m < rows; ++m, sums += panels * 16, out += stride)
    for (long lane = from; lane < to; lane += 16) {
      const int count = static_cast<int>(min_of(16, to - lane));
      store_values<D>(out + lane - from, load_part<F16>(sums + lane, count), count);
    }
}

constexpr long kHeadRows = 32;  // of a work item

template <class D>
void heads_linear_typed(const HeadsArgs& args) {
  using Value = typename D::Value;
  const PackedView& w = args.weight;
  const long n = w.n / args.heads, blocks = (args.rows + kHeadRows - 1) / kHeadRows, row_stride = args.heads * w.k;
  const double work = static_cast<double>(args.rows) * static_cast<double>(w.n) * static_cast<double>(w.k);
  each_item(args.heads * blocks, work, [&](long item, int) {
    const long head = item % args.heads, block = item / args.heads;
    const long first = block * kHeadRows, last = min_of(args.rows, first + kHeadRows);
    const long begin = head * n, end = begin + n;  // rows of the weight
    const int wide = panels_at_once(static_cast<int>(min_of(kMaxRows, last - first)));
    alignas(64) float sums[kMaxRows * kMaxPanels * 16];
    for (long panel = begin / 16; panel * 16 < end;) {
      const int panels = panel + wide <= (end + 15) / 16 ? wide : 1;
      for (long row = first; row < last; row += kMaxRows) {
        const int rows = static_cast<int>(min_of(kMaxRows, last - row));
        TileArgs tile{};
        tile.bases = 1;
        tile.base[0] = w.cells + panel * w.steps() * 16;
        for (int p = 0; p < panels; ++p) tile.offset[p] = p * w.steps() * 16;
        tile.step_stride = 16;
        tile.steps = w.steps();
        tile.x = reinterpret_cast<const char*>(static_cast<const Value*>(args.x) + row * row_stride + head * w.k);
        tile.x_stride = static_cast<size_t>(row_stride) * sizeof(Value);
        tile.x_step = 4;
        tile.acc = sums;
        tile.acc_stride = static_cast<size_t>(panels) * 16;
        (row == first ? pick_tile<D, Fetch::kStream>(rows, panels) : pick_tile<D, Fetch::kNothing>(rows, panels))(tile, false);
        const long from = panel * 16 < begin ? begin - panel * 16 : 0;
        const long to = min_of(panels * 16, end - panel * 16), column = panel * 16 + from - begin;
        Value* out = static_cast<Value*>(args.out) + (row * args.heads + head) * args.out_stride + column;
        store_head<D>(sums, rows, panels, from, to, out, args.heads * args.out_stride);
      }
      panel += panels;
    }
  });
}

}  // namespace
