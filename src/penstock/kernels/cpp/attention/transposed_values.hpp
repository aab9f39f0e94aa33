// Columns of keys as values: one page's cells [columns][16 tokens] to cells [tokens][columns].
#pragma once

#include "gemm/tile.hpp"

namespace {

typedef uint64_t Words8 __attribute__((vector_size(64)));
typedef uint32_t Words16 __attribute__((vector_size(64)));
typedef uint16_t Words32 __attribute__((vector_size(64)));

// Eight rows of eight words: rows become columns.
PS_INLINE void turn_words(Words8 (&a)[8]) {
  Words8 b[8];
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    b[i] = __builtin_shufflevector(a[i], a[i + 1], 0, 8, 2, 10, 4, 12, 6, 14);
    b[i + 1] = __builtin_shufflevector(a[i], a[i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4)
#pragma GCC unroll 2
    for (int j = i; j < i + 2; ++j) {
      a[j] = __builtin_shufflevector(b[j], b[j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
      a[j + 2] = __builtin_shufflevector(b[j], b[j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    b[i] = __builtin_shufflevector(a[i], a[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    b[i + 4] = __builtin_shufflevector(a[i], a[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) a[i] = b[i];
}

template <class V>
PS_INLINE V load_words(const uint32_t* from) {
  V to;
  __builtin_memcpy(&to, from, 64);
  return to;
}

// Words (2 tokens by 2 columns) of eight rows to cells of eight rows, `column` the first of sixteen.
PS_INLINE void store_words(Words8 (&words)[8], uint32_t* to, size_t stride) {
  turn_words(words);
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) __builtin_memcpy(to + static_cast<size_t>(i) * stride, &words[i], 64);
}

// Sixteen columns of a page from `keys` on.
template <class D>
PS_INLINE void turn_sixteen(const uint32_t* keys, uint32_t* to, size_t stride) {
  Words8 words[8];
  if constexpr (D::kPerCell == 2) {  // a row is a pair of columns: its word p becomes that of tokens 2 p and 2 p + 1
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      const Words32 row = load_words<Words32>(keys + i * 16);
      words[i] = (Words8)__builtin_shufflevector(row, row, 0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15, 16, 18,
                                                 17, 19, 20, 22, 21, 23, 24, 26, 25, 27, 28, 30, 29, 31);
    }
    store_words(words, to, stride);
  } else {
    for (int half = 0; half < 2; ++half) {  // of the tokens
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) {
        const Words16 a = load_words<Words16>(keys + 2 * i * 16), b = load_words<Words16>(keys + (2 * i + 1) * 16);
        words[i] = half == 0 ? (Words8)__builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
                             : (Words8)__builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
      }
      store_words(words, to + static_cast<size_t>(half) * 8 * stride, stride);
    }
  }
}

// The first `columns` of a page's keys to cells [16 / per_cell][stride].
template <class D>
void turn_keys(const uint32_t* keys, long columns, uint32_t* to, size_t stride) {
  long c = 0;
  for (; c + 16 <= columns; c += 16) turn_sixteen<D>(keys + c / D::kPerCell * 16, to + c, stride);
  const auto* from = reinterpret_cast<const typename D::Value*>(keys);
  auto* out = reinterpret_cast<typename D::Value*>(to);
  for (; c < columns; ++c)
    for (long token = 0; token < 16; ++token)
      out[(token / D::kPerCell * static_cast<long>(stride) + c) * D::kPerCell + token % D::kPerCell] =
          from[(c / D::kPerCell * 16 + token) * D::kPerCell + c % D::kPerCell];
}

}  // namespace
