// What stands between the projections of queries, keys and values and attention: norms of heads, rotary positions, and
// the write to KV pages.
#pragma once

#include "rows/elementwise.hpp"

namespace {

inline void norm_heads_all(const NormHeadsArgs& args) {
  const double work = static_cast<double>(args.rows * args.count * args.group) * 2;
  each_row(args.rows, args.count * args.group, work, [&](long row, int) {
    float* x = args.x + row * args.width + args.first;
    for (long head = 0; head < args.count; ++head, x += args.group) {
      const F16 inverse = inverse_rms(x, args.group, args.eps);
      for (long i = 0; i < args.group; i += 16) {
        const int count = static_cast<int>(min_of(16, args.group - i));
        store_part(x + i, load_part<F16>(x + i, count) * inverse * load_part<F16>(args.weight + i, count), count);
      }
    }
  });
}

// (first, second) halves of a head turned by the position's angles: a cos - b sin, b cos + a sin.
PS_INLINE void rotate(const float* head, const float* angles, long half, float* to) {
  for (long i = 0; i < half; i += 16) {
    const int count = static_cast<int>(min_of(16, half - i));
    const F16 a = load_part<F16>(head + i, count), b = load_part<F16>(head + half + i, count);
    const F16 cos = load_part<F16>(angles + i, count), sin = load_part<F16>(angles + half + i, count);
    store_part(to + i, fma16(a, cos, splat(0.0f) - b * sin), count);
    store_part(to + half + i, fma16(b, cos, a * sin), count);
  }
}

// The same of columns (2 i, 2 i + 1).
__attribute__((noinline)) void rotate_interleaved(const float* head, const float* angles, long half, float* to) {
  alignas(64) float split[kMaxHeadDim], turned[kMaxHeadDim];
  for (long i = 0; i < half; ++i) split[i] = head[2 * i], split[half + i] = head[2 * i + 1];
  rotate(split, angles, half, turned);
  for (long i = 0; i < half; ++i) to[2 * i] = turned[i], to[2 * i + 1] = turned[half + i];
}

// cos and sin of a token whose axes are turned by rows of their own (M-RoPE, arXiv:2409.12191).
inline void angles_by_axis(const RopeView& rope, const int32_t* turns, float* angles) {
  for (long i = 0; i < rope.pairs; ++i) {
    const float* row = rope.table + turns[rope.axes[i]] * 2 * rope.pairs;
    angles[i] = row[i], angles[rope.pairs + i] = row[rope.pairs + i];
  }
}

// What one row of the table does to a head: its first 2 * pairs columns are turned, the others stay.
// Plain: all columns are turned, as halves.
template <bool kPlain>
struct Turn {
  const float* angles;
  long pairs, rest;
  bool interleaved;

  PS_INLINE Turn(const RopeView& rope, long row, long head_dim)
      : angles(rope.table + row * 2 * rope.pairs),
        pairs(rope.pairs),
        rest(head_dim - 2 * rope.pairs),
        interleaved(rope.interleaved) {}

  PS_INLINE void operator()(const float* head, float* to) const {
    if constexpr (kPlain) return rotate(head, angles, pairs, to);
    if (interleaved)
      rotate_interleaved(head, angles, pairs, to);
    else
      rotate(head, angles, pairs, to);
    if (rest != 0) __builtin_memcpy(to + 2 * pairs, head + 2 * pairs, static_cast<size_t>(rest) * 4);
  }
};

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

template <class D, bool kPlain>
void rope_rows(const RopeArgs& args) {
  using Value = typename D::Value;
  const long key_dim = args.kv.key_dim, value_dim = args.kv.value_dim, groups = args.kv.kv_heads;
  const long width = (args.heads + groups) * key_dim + groups * value_dim;
  const double work = static_cast<double>(args.batch.tokens * width) * 4;
  each_row(args.batch.tokens, width, work, [&](long token, int) {
    const long position = args.batch.positions[token];
    const float* head = args.qkv + token * width;
    const int32_t* table = args.batch.table + args.sequence_of[token] * args.batch.table_width;
    const long page = table[position / kPageTokens], slot = position % kPageTokens;
    Turn<kPlain> turn(args.rope, args.angles_of[token], key_dim);
    alignas(64) float angles[kMaxHeadDim], turned[kMaxHeadDim];
    if (args.rope.axes != nullptr && args.batch.turns != nullptr) {
      angles_by_axis(args.rope, args.batch.turns + token * 3, angles);
      turn.angles = angles;
    }
    alignas(64) Value rounded[kMaxHeadDim];
    Value* q = static_cast<Value*>(args.q) + token * args.heads * key_dim;
    for (int h = 0; h < args.heads; ++h, head += key_dim, q += key_dim) {
      turn(head, turned);
      if (!kPlain && args.q_scale != nullptr)
        for (long c = 0; c < key_dim; ++c) turned[c] *= args.q_scale[position];
      to_compute_typed<D>(turned, key_dim, q);
    }
    for (int g = 0; g < groups; ++g, head += key_dim) {
      turn(head, turned);
      to_compute_typed<D>(turned, key_dim, rounded);
      write_key<D>(reinterpret_cast<Value*>(args.kv.keys(page, args.layer, g)), rounded, key_dim, slot);
    }
    for (int g = 0; g < groups; ++g, head += value_dim) {
      to_compute_typed<D>(head, value_dim, rounded);
      write_value<D>(reinterpret_cast<Value*>(args.kv.values(page, args.layer, g)), rounded, value_dim, slot);
    }
  });
}

template <class D>
void rope_and_write_typed(const RopeArgs& args) {
  const RopeView& rope = args.rope;
  const bool plain = 2 * rope.pairs == args.kv.key_dim && !rope.interleaved && args.q_scale == nullptr;
  plain ? rope_rows<D, true>(args) : rope_rows<D, false>(args);
}

}  // namespace
