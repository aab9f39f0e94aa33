// Where the finished sums of a product go: to memory, to the best tokens of their rows, or through a gate.
#pragma once

#include "gemm/activation.hpp"
#include "gemm/tile.hpp"
#include "sampling/fused_argmax.hpp"

namespace {

PS_INLINE long min_of(long a, long b) { return a < b ? a : b; }

constexpr int kRowsAhead = 8;  // between asking for an output's memory and writing it

// Sums [rows][panels * 16] to their place in the output, or to the best tokens of their rows.
void write_tile(const LinearArgs& args, float* sums, long row, int rows, long panel, int panels) {
  for (int m = 0; m < rows; ++m) {
    if (args.picks != nullptr && row + m >= args.stored) {
      if (args.form.changes())
        for (float *x = sums + m * panels * 16, *end = x + panels * 16; x < end; x += 16) store(x, formed(load(x), args.form));
      Pick& pick = args.picks[row + m - args.stored];
      offer(pick, sums + m * panels * 16, pick.first + panel * 16, min_of(panels * 16, args.weight.n - panel * 16));
      continue;
    }
    const float* later = args.out + (row + m + kRowsAhead) * args.weight.n + panel * 16;  // rows are far apart
    for (int p = 0; p < panels; ++p) {
      __builtin_prefetch(later + p * 16, 1, 3);
      const long column = (panel + p) * 16;
      float* to = args.out + (row + m) * args.weight.n + column;
      const int count = static_cast<int>(min_of(16, args.weight.n - column));
      F16 sum = load(sums + (m * panels + p) * 16);
      if (args.add) sum = load_part<F16>(to, count) + sum;
      store_part(to, sum, count);
    }
  }
}

// activation(gate) * up of sums [rows][panels * 16] each, in the compute type; `panel` is gate's.
template <class D>
void write_gated(const LinearArgs& args, const float* gate, const float* up, long row, int rows, long panel, int panels) {
  const long width = args.weight.n / 2;
  const F16 alpha = splat(args.gate->alpha);
  with_activation(args.gate->activation, [&]<Activation kKind>() {
    for (int m = 0; m < rows; ++m)
      for (int p = 0; p < panels; ++p, gate += 16, up += 16) {
        typename D::Value* to = static_cast<typename D::Value*>(args.gated) + (row + m) * width + (panel + p) * 16;
        store_values<D>(to, activated<kKind>(load(gate), alpha) * load(up), 16);
      }
  });
}

}  // namespace
