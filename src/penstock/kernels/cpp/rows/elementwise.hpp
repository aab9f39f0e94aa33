// Row by row: RMS norm, conversion.
#pragma once

#include "families/math.hpp"
#include "gemm/gemm.hpp"

namespace {

// Rows of one work item, so that an item is worth a thread's while.
PS_INLINE long rows_an_item(long rows, long width) {
  const long wanted = 1 + (1 << 15) / (width + 1);
  return wanted < rows ? wanted : rows;
}

// fn(row, worker) for every row.
template <class Fn>
void each_row(long rows, long width, double work, const Fn& fn) {
  if (rows == 0) return;
  const long step = rows_an_item(rows, width);
  each_item((rows + step - 1) / step, work, [&](long item, int worker) {
    const long end = min_of(rows, (item + 1) * step);
    for (long row = item * step; row < end; ++row) fn(row, worker);
  });
}

// What brings a row of x to unit mean square.
PS_INLINE F16 inverse_rms(const float* x, long width, float eps) {
  F16 sum[4] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
  for (long i = 0; i < width; i += 16) {
    const F16 v = load_part<F16>(x + i, static_cast<int>(min_of(16, width - i)));
    F16& own = sum[(i / 16) & 3];
    own = fma16(v, v, own);
  }
  const float mean = sum_lanes((sum[0] + sum[1]) + (sum[2] + sum[3])) / static_cast<float>(width);
  return splat(1.0f / __builtin_sqrtf(mean + eps));
}

template <class D>
void rms_norm_typed(const NormArgs& args) {
  using Value = typename D::Value;
  const double work = static_cast<double>(args.rows) * static_cast<double>(args.width) * 2;
  each_row(args.rows, args.width, work, [&](long row, int) {
    const float* x = args.hidden + row * args.width;
    Value* to = static_cast<Value*>(args.out) + row * args.width;
    const F16 inverse = inverse_rms(x, args.width, args.eps);
    for (long i = 0; i < args.width; i += 16) {
      const int count = static_cast<int>(min_of(16, args.width - i));
      const F16 v = load_part<F16>(x + i, count) * inverse * load_part<F16>(args.weight + i, count);
      store_values<D>(to + i, v, count);
    }
  });
}

template <class D>
void to_compute_typed(const float* from, long count, typename D::Value* to) {
  for (long i = 0; i < count; i += 16) {
    const int part = static_cast<int>(min_of(16, count - i));
    store_values<D>(to + i, load_part<F16>(from + i, part), part);
  }
}

}  // namespace
