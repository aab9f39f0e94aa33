// Row by row: RMS norm, rotary embedding with the write to KV pages, conversion.
#pragma once

#include "gemm.hpp"
#include "math.hpp"

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

// (first, second) halves of a head turned by the position's angles: a cos - b sin, b cos + a sin.
PS_INLINE void rotate(const float* head, const float* rope, long half, float* to) {
  for (long i = 0; i < half; i += 16) {
    const int count = static_cast<int>(min_of(16, half - i));
    const F16 a = load_part<F16>(head + i, count), b = load_part<F16>(head + half + i, count);
    const F16 cos = load_part<F16>(rope + i, count), sin = load_part<F16>(rope + half + i, count);
    store_part(to + i, fma16(a, cos, splat(0.0f) - b * sin), count);
    store_part(to + half + i, fma16(b, cos, a * sin), count);
  }
}

// Key of one token to its lane: cells [C / per_cell][16 tokens].
template <class D>
PS_INLINE void write_key(typename D::Value* page, const typename D::Value* key, long head_dim, long slot) {
  for (long c = 0; c < head_dim; c += D::kPerCell)
    __builtin_memcpy(page + c * 16 + slot * D::kPerCell, key + c, sizeof(uint32_t));
}

// Value of one token to its row: cells [16 / per_cell][C].
template <class D>
PS_INLINE void write_value(typename D::Value* page, const typename D::Value* value, long head_dim, long slot) {
  typename D::Value* row = page + slot / D::kPerCell * head_dim * D::kPerCell + slot % D::kPerCell;
  for (long c = 0; c < head_dim; ++c) row[c * D::kPerCell] = value[c];
}

template <class D>
void rope_and_write_typed(const RopeArgs& args) {
  using Value = typename D::Value;
  const long head_dim = args.kv.head_dim, half = head_dim / 2;
  const long all_heads = args.heads + 2 * args.kv.kv_heads;
  const double work = static_cast<double>(args.batch.tokens * all_heads * head_dim) * 4;
  each_row(args.batch.tokens, all_heads * head_dim, work, [&](long token, int) {
    const long position = args.batch.positions[token];
    const float* head = args.qkv + token * all_heads * head_dim;
    const float* rope = args.rope + position * head_dim;
    const int32_t* table = args.batch.table + args.sequence_of[token] * args.batch.table_width;
    const long page = table[position / kPageTokens], slot = position % kPageTokens;
    alignas(64) float turned[kMaxHeadDim];
    alignas(64) Value rounded[kMaxHeadDim];
    Value* q = static_cast<Value*>(args.q) + token * args.heads * head_dim;
    for (int h = 0; h < args.heads; ++h, head += head_dim, q += head_dim) {
      rotate(head, rope, half, turned);
      to_compute_typed<D>(turned, head_dim, q);
    }
    for (int g = 0; g < args.kv.kv_heads; ++g, head += head_dim) {
      rotate(head, rope, half, turned);
      to_compute_typed<D>(turned, head_dim, rounded);
      write_key<D>(reinterpret_cast<Value*>(args.kv.keys(page, args.layer, g)), rounded, head_dim, slot);
    }
    for (int g = 0; g < args.kv.kv_heads; ++g, head += head_dim) {
      to_compute_typed<D>(head, head_dim, rounded);
      write_value<D>(reinterpret_cast<Value*>(args.kv.values(page, args.layer, g)), rounded, head_dim, slot);
    }
  });
}

}  // namespace
