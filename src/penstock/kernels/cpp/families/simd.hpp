// Sixteen float lanes on any machine, as GCC vector extensions over the registers of one kernel family.
//
// Included by families/family.cpp only, once a family and under that family's own flags; everything has internal linkage, so
// code compiled for one instruction set is never linked into another.  Knows nothing about threads or layouts.
//
// Law: one lane gives the same bits whether the vector is full or partly loaded, so a tail never takes another path.
// Contraction is off for the whole build; multiply-add is fused in `fma16` and nowhere else.
#pragma once

#include <cstddef>
#include <cstdint>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define PS_INLINE inline __attribute__((always_inline))
#define PS_EACH_PART _Pragma("GCC unroll 4") for (int i = 0; i < kParts; ++i)

namespace {

#if defined(__AVX512F__)
constexpr int kWidth = 16;  // float lanes in one register
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif
constexpr int kParts = 16 / kWidth;

typedef float FloatReg __attribute__((vector_size(kWidth * 4)));
typedef int32_t IntReg __attribute__((vector_size(kWidth * 4)));
typedef uint32_t WordReg __attribute__((vector_size(kWidth * 4)));

struct F16 {
  using Reg = FloatReg;
  Reg part[kParts];
};
struct I16 {
  using Reg = IntReg;
  Reg part[kParts];
};
struct U16 {
  using Reg = WordReg;
  Reg part[kParts];
};
using Mask16 = I16;  // each lane all ones or all zeros

template <class To, class From>
PS_INLINE To bits_as(const From& from) {
  To to;
  PS_EACH_PART to.part[i] = (typename To::Reg)from.part[i];
  return to;
}

// --- memory ---------------------------------------------------------------------------------------------------------

template <class V>
PS_INLINE V load_as(const void* from) {
  V to;
  PS_EACH_PART __builtin_memcpy(&to.part[i], static_cast<const char*>(from) + i * kWidth * 4, kWidth * 4);
  return to;
}
PS_INLINE F16 load(const float* from) { return load_as<F16>(from); }

template <class V>
PS_INLINE void store(void* to, const V& value) {
  PS_EACH_PART __builtin_memcpy(static_cast<char*>(to) + i * kWidth * 4, &value.part[i], kWidth * 4);
}

// The first `count` lanes (0 to 16); the others are zero, and memory behind them is not touched.
template <class V>
PS_INLINE V load_part(const void* from, int count) {
#if defined(__AVX512F__)
  const __mmask16 lanes = static_cast<__mmask16>((1u << count) - 1u);
  V to;
  to.part[0] = (typename V::Reg)_mm512_maskz_loadu_epi32(lanes, from);
  return to;
#else
  if (count == 16) return load_as<V>(from);
  alignas(64) uint32_t buffer[16] = {};
  __builtin_memcpy(buffer, from, static_cast<size_t>(count) * 4);
  return load_as<V>(buffer);
#endif
}

template <class V>
PS_INLINE void store_part(void* to, const V& value, int count) {
#if defined(__AVX512F__)
  const __mmask16 lanes = static_cast<__mmask16>((1u << count) - 1u);
  _mm512_mask_storeu_epi32(to, lanes, (__m512i)value.part[0]);
#else
  if (count == 16) return store(to, value);
  alignas(64) uint32_t buffer[16];
  store(buffer, value);
  __builtin_memcpy(to, buffer, static_cast<size_t>(count) * 4);
#endif
}

PS_INLINE F16 splat(float value) {
  F16 to;
  PS_EACH_PART to.part[i] = value - FloatReg{};
  return to;
}
PS_INLINE U16 splat_word(uint32_t value) {
  U16 to;
  PS_EACH_PART to.part[i] = value + WordReg{};
  return to;
}
PS_INLINE I16 splat_int(int32_t value) {
  I16 to;
  PS_EACH_PART to.part[i] = value + IntReg{};
  return to;
}

// 0, 1, … 15, plus `first`.
PS_INLINE I16 iota(int32_t first) {
  constexpr int32_t kCount[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  I16 to = load_as<I16>(kCount);
  PS_EACH_PART to.part[i] += first;
  return to;
}

// --- arithmetic -----------------------------------------------------------------------------------------------------

#define PS_BINARY(V, op)                                   \
  PS_INLINE V operator op(const V& a, const V& b) {        \
    V to;                                                  \
    PS_EACH_PART to.part[i] = a.part[i] op b.part[i];      \
    return to;                                             \
  }
PS_BINARY(F16, +)
PS_BINARY(F16, -)
PS_BINARY(F16, *)
PS_BINARY(F16, /)
PS_BINARY(I16, +)
PS_BINARY(I16, -)
PS_BINARY(I16, &)
PS_BINARY(I16, |)
PS_BINARY(U16, +)
PS_BINARY(U16, ^)
PS_BINARY(U16, &)
PS_BINARY(U16, |)
#undef PS_BINARY

PS_INLINE U16 operator<<(const U16& a, int by) {
  U16 to;
  PS_EACH_PART to.part[i] = a.part[i] << by;
  return to;
}
PS_INLINE U16 operator>>(const U16& a, int by) {
  U16 to;
  PS_EACH_PART to.part[i] = a.part[i] >> by;
  return to;
}

#define PS_COMPARE(name, V, op)                                     \
  PS_INLINE Mask16 name(const V& a, const V& b) {                   \
    Mask16 to;                                                      \
    PS_EACH_PART to.part[i] = (IntReg)(a.part[i] op b.part[i]);     \
    return to;                                                      \
  }
PS_COMPARE(less, F16, <)
PS_COMPARE(greater, F16, >)
PS_COMPARE(at_least, F16, >=)
PS_COMPARE(less, I16, <)
#undef PS_COMPARE

PS_INLINE F16 select(const Mask16& mask, const F16& yes, const F16& no) {
  F16 to;
  PS_EACH_PART to.part[i] = mask.part[i] ? yes.part[i] : no.part[i];
  return to;
}

// a where a > b, else b: so a NaN in `a` is dropped.
PS_INLINE F16 max16(const F16& a, const F16& b) { return select(greater(a, b), a, b); }

// a * b + c, rounded once; twice in the portable family, which so has the same bits on every machine.
PS_INLINE F16 fma16(const F16& a, const F16& b, const F16& c) {
  F16 to;
#if defined(__AVX512F__)
  to.part[0] = (FloatReg)_mm512_fmadd_ps((__m512)a.part[0], (__m512)b.part[0], (__m512)c.part[0]);
#elif defined(__AVX2__)
  PS_EACH_PART to.part[i] = (FloatReg)_mm256_fmadd_ps((__m256)a.part[i], (__m256)b.part[i], (__m256)c.part[i]);
#else
  PS_EACH_PART to.part[i] = a.part[i] * b.part[i] + c.part[i];
#endif
  return to;
}

PS_INLINE F16 to_float(const I16& a) {
  F16 to;
  PS_EACH_PART to.part[i] = __builtin_convertvector(a.part[i], FloatReg);
  return to;
}
PS_INLINE I16 to_int(const F16& a) {
  I16 to;
  PS_EACH_PART to.part[i] = __builtin_convertvector(a.part[i], IntReg);
  return to;
}

// --- across lanes: always the same tree of pairs (i, i + 8), (i, i + 4), (i, i + 2), (i, i + 1) -----------------------

typedef float Quad __attribute__((vector_size(16)));
struct Quads {
  Quad at[4];
};

PS_INLINE Quads quads(const F16& a) {
  Quads to;
  store(&to, a);
  return to;
}

PS_INLINE float sum_lanes(const F16& a) {
  const Quads q = quads(a);
  const Quad by4 = (q.at[0] + q.at[2]) + (q.at[1] + q.at[3]);
  return (by4[0] + by4[2]) + (by4[1] + by4[3]);
}

PS_INLINE Quad max_quad(const Quad& a, const Quad& b) { return a > b ? a : b; }
PS_INLINE float max_lanes(const F16& a) {
  const Quads q = quads(a);
  const Quad by4 = max_quad(max_quad(q.at[0], q.at[2]), max_quad(q.at[1], q.at[3]));
  const float even = by4[0] > by4[2] ? by4[0] : by4[2], odd = by4[1] > by4[3] ? by4[1] : by4[3];
  return even > odd ? even : odd;
}

PS_INLINE uint32_t lanes_set(const Mask16& mask) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask((__m512i)mask.part[0]);
#elif defined(__AVX2__)
  return static_cast<uint32_t>(_mm256_movemask_ps((__m256)mask.part[0])) |
         (static_cast<uint32_t>(_mm256_movemask_ps((__m256)mask.part[1])) << 8);
#else
  uint32_t set = 0;
  for (int i = 0; i < kParts; ++i)
    for (int j = 0; j < kWidth; ++j) set |= static_cast<uint32_t>(mask.part[i][j] & 1) << (i * kWidth + j);
  return set;
#endif
}

// --- cells of several rows, side by side ----------------------------------------------------------------------------

// cells[step][row] of 32 bits each, from rows `row_bytes` apart; returns how many steps were done, from the first on.
#if defined(__AVX512F__)
PS_INLINE long transpose_cells(const void* from, size_t row_bytes, int rows, long steps, uint32_t* cells) {
  typedef uint64_t PairReg __attribute__((vector_size(64)));
  for (int m = 0; m < rows; m += 8) {
    const int count = rows - m < 8 ? rows - m : 8;
    const __mmask8 there = static_cast<__mmask8>((1u << count) - 1u);
    const char* x = static_cast<const char*>(from) + static_cast<size_t>(m) * row_bytes;
    for (long step = 0; step + 16 <= steps; step += 16) {
      WordReg row[8];
      PairReg pair[8];  // of rows (0, 1), (2, 3) and so on; steps 0 and 1, or 2 and 3, of every four
      _Pragma("GCC unroll 8") for (int i = 0; i < 8; ++i)
        row[i] = load_as<U16>(x + (i < count ? i : 0) * row_bytes + step * 4).part[0];
      _Pragma("GCC unroll 4") for (int i = 0; i < 8; i += 2) {
        pair[i] = (PairReg)__builtin_shufflevector(row[i], row[i + 1], 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
        pair[i + 1] =
            (PairReg)__builtin_shufflevector(row[i], row[i + 1], 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
      }
      _Pragma("GCC unroll 4") for (int c = 0; c < 4; ++c) {  // of every four steps
        const PairReg *upper = pair + c / 2, *lower = upper + 4;
        const PairReg top = c % 2 == 0 ? __builtin_shufflevector(upper[0], upper[2], 0, 8, 2, 10, 4, 12, 6, 14)
                                       : __builtin_shufflevector(upper[0], upper[2], 1, 9, 3, 11, 5, 13, 7, 15);
        const PairReg bottom = c % 2 == 0 ? __builtin_shufflevector(lower[0], lower[2], 0, 8, 2, 10, 4, 12, 6, 14)
                                          : __builtin_shufflevector(lower[0], lower[2], 1, 9, 3, 11, 5, 13, 7, 15);
        const PairReg half[2] = {__builtin_shufflevector(top, bottom, 0, 1, 8, 9, 2, 3, 10, 11),
                                 __builtin_shufflevector(top, bottom, 4, 5, 12, 13, 6, 7, 14, 15)};
        uint32_t* to = cells + (step + c) * rows + m;
        _Pragma("GCC unroll 2") for (int i = 0; i < 2; ++i, to += 8 * rows) {
          _mm256_mask_storeu_epi32(to, there, (__m256i)__builtin_shufflevector(half[i], half[i], 0, 1, 2, 3));
          _mm256_mask_storeu_epi32(to + 4 * rows, there, (__m256i)__builtin_shufflevector(half[i], half[i], 4, 5, 6, 7));
        }
      }
    }
  }
  return steps / 16 * 16;
}
#else
PS_INLINE long transpose_cells(const void*, size_t, int, long, uint32_t*) { return 0; }
#endif

// --- bf16: the upper half of a float --------------------------------------------------------------------------------

// Rounded to the nearest bf16, ties to even, as a float.  NaN stays NaN (its sign and a set quiet bit).
PS_INLINE F16 round_bf16(const F16& a) {
  const U16 bits = bits_as<U16>(a);
  U16 odd = (bits >> 16) & splat_word(1);
  const U16 rounded = (bits + odd + splat_word(0x7FFF)) & splat_word(0xFFFF0000u);
  Mask16 ordered;
  PS_EACH_PART ordered.part[i] = (IntReg)(a.part[i] == a.part[i]);
  return select(ordered, bits_as<F16>(rounded), bits_as<F16>((bits | splat_word(0x00400000u)) & splat_word(0xFFFF0000u)));
}

typedef uint16_t HalfReg __attribute__((vector_size(kWidth * 2)));

// The upper halves, for values that are bf16 already.
PS_INLINE void store_upper_halves(uint16_t* to, const F16& value, int count) {
  const U16 words = bits_as<U16>(value) >> 16;
  HalfReg half[kParts];
  PS_EACH_PART half[i] = __builtin_convertvector(words.part[i], HalfReg);
  if (count == 16) {
    __builtin_memcpy(to, half, 32);
  } else {
    __builtin_memcpy(to, half, static_cast<size_t>(count) * 2);
  }
}

PS_INLINE float bf16_to_float(uint16_t bits) {
  const uint32_t word = static_cast<uint32_t>(bits) << 16;
  float value;
  __builtin_memcpy(&value, &word, 4);
  return value;
}

}  // namespace
