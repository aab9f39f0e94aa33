// Softmax of attention's rows: running over the blocks of a partition; and the softmax of two parts of the keys as one.
//
// A row's sums depend on its own scores only, block by block.  Knows nothing about keys, values or heads.
//
// After "Online normalizer calculation for softmax" (Milakov, Gimelshein 2018) and FlashAttention-2 (Dao 2023).
#pragma once

#include "rows/elementwise.hpp"

namespace {

constexpr float kLog2E = 1.44269504f;

// Scores of a block, of which a row sees keys [begin, end).
struct Seen {
  long begin, end;
};

// Softmax of some rows over some of their keys.  Its memory is laid out here, see attention_args.hpp: softmax_floats.
struct SoftmaxRows {
  float* top;  // [rows]: largest score, in units of log 2
  float* sum;  // [rows][16]: of the exponentials, lane by lane, at last in lane 0; all zero: the row saw none of these keys
  float* out;  // [rows][width]: sum of exponential times value
  long width;

  SoftmaxRows() = default;
  SoftmaxRows(float* memory, long rows, long columns)
      : top(memory + rows * (columns + 16)), sum(memory + rows * columns), out(memory), width(columns) {}

  void clear(long first, long rows) const {
    for (long row = first; row < first + rows; ++row) top[row] = -__builtin_inff();
    leave_out(first, rows);
    __builtin_memset(out + first * width, 0, static_cast<size_t>(rows * width) * 4);
  }

  // Rows that see none of the keys.
  void leave_out(long first, long rows) const { __builtin_memset(sum + first * 16, 0, static_cast<size_t>(rows) * 64); }

  // After the last block: the lanes of each sum as one.
  void close(long rows) const {
    for (long row = 0; row < rows; ++row) sum[row * 16] = sum_lanes(load(sum + row * 16));
  }

  // Scores of one block, and what is added to them unless null, to weights of row `row`; what was summed before is scaled
  // to the new maximum.
  template <class D>
  PS_INLINE void soften(long row, const Seen& seen, const Softmax& how, const float* scores, const float* bias,
                        typename D::Value* weights) const {
    const F16 nothing = splat(-__builtin_inff());
    F16 s[4];
    scaled(how, scores, s);
    if (bias != nullptr) {
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) s[j] = fma16(load(bias + j * 16), splat(kLog2E), s[j]);
    }
    if (seen.end < kBlockKeys) {
      const I16 end = splat_int(static_cast<int32_t>(seen.end));
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) s[j] = select(less(iota(j * 16), end), s[j], nothing);
    }
    if (seen.begin > 0) {
      const I16 begin = splat_int(static_cast<int32_t>(seen.begin));
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) s[j] = select(less(iota(j * 16), begin), nothing, s[j]);
    }
    const float before = top[row];
    const float here = max_lanes(max16(max16(s[0], s[1]), max16(s[2], s[3])));
    const float highest = here > before ? here : before;
    const F16 shift = splat(highest);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      s[j] = D::rounded(exp2_nonpositive(s[j] - shift));
      D::store_rounded(weights + j * 16, s[j], 16);
    }
    F16 total = load(sum + row * 16);
    if (highest != before) {
      top[row] = highest;
      alignas(64) float factor[16];
      store(factor, exp2_nonpositive(splat(before - highest)));
      const F16 shrink = splat(factor[0]);
      total = total * shrink;
      float* to = out + row * width;
      for (long c = 0; c < width; c += 16) store(to + c, load(to + c) * shrink);
    }
    store(sum + row * 16, total + ((s[0] + s[1]) + (s[2] + s[3])));
  }

  // In units of log 2.
  static PS_INLINE void scaled(const Softmax& how, const float* scores, F16 (&s)[4]) {
    if (how.softcap == 0) {
      const F16 scale = splat(how.scale * kLog2E);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) s[j] = load(scores + j * 16) * scale;
      return;
    }
    const F16 scale = splat(how.scale / how.softcap), cap = splat(how.softcap * kLog2E);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) s[j] = tanh16(load(scores + j * 16) * scale) * cap;
  }

  // Joins the same rows over other keys.  A row's sum is at least 1, or not a number, if it saw any; a row that saw none on
  // one side has the bits of the other.
  void join(const SoftmaxRows& next, long rows) const {
    for (long row = 0; row < rows; ++row) {
      if (next.sum[row * 16] == 0) continue;
      const float* from = next.out + row * width;
      float* to = out + row * width;
      if (sum[row * 16] == 0) {
        top[row] = next.top[row];
        sum[row * 16] = next.sum[row * 16];
        __builtin_memcpy(to, from, static_cast<size_t>(width) * 4);
        continue;
      }
      const float before = top[row], highest = next.top[row] > before ? next.top[row] : before;
      alignas(64) float factor[16] = {before - highest, next.top[row] - highest};
      store(factor, exp2_nonpositive(load(factor)));
      const F16 a = splat(factor[0]), b = splat(factor[1]);
      top[row] = highest;
      sum[row * 16] = sum[row * 16] * factor[0] + next.sum[row * 16] * factor[1];
      for (long c = 0; c < width; c += 16) store(to + c, load(to + c) * a + load(from + c) * b);
    }
  }

  // What a joined row's values are multiplied by; the sink, if there is one, is the last to join.
  float normalizer(long row, const float* sink) const {
    if (sink == nullptr) return 1.0f / sum[row * 16];
    const float score = *sink * kLog2E, highest = score > top[row] ? score : top[row];
    alignas(64) float factor[16] = {top[row] - highest, score - highest};
    store(factor, exp2_nonpositive(load(factor)));
    return factor[0] / (sum[row * 16] * factor[0] + factor[1]);
  }
};

}  // namespace
