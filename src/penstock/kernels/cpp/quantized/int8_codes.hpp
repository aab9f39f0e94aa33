// Codes as the integers that they stand for, and sums of their products with 8-bit inputs.
//
// A unit of 32 inputs has 8 quads: four inputs by sixteen outputs, a byte each.  Codes of 8 bits lie as these bytes, two's
// complement.  Of fewer bits, 64 bytes have the lowest four of two quads; then come 64 bytes with a bit for each quad
// (5 bits), or twice 64 with two bits for each of four (6 bits).
//
// Sums of integers are exact, so all families have the same.  Products of pairs are summed in 16 bits as long as they fit,
// then in 32; with VNNI in 32 at once.
#pragma once

#include <utility>

#include "gemm/gemm.hpp"
#include "quantized/quantized_decode.hpp"

namespace {

constexpr int kQuads = 8;  // of a unit
constexpr int kQuadInputs = 4;

// The byte of one weight: its code, or with 8 bits its integer.
PS_INLINE unsigned quad_code_at(const uint8_t* unit, int bits, long column, int lane) {
  const long quad = column / kQuadInputs, place = lane * kQuadInputs + column % kQuadInputs;
  if (bits == 8) return unit[quad * 64 + place];
  const unsigned low = static_cast<unsigned>(unit[quad / 2 * 64 + place]) >> (quad % 2 * 4) & 15;
  if (bits == 5) return low | (static_cast<unsigned>(unit[kHighBits + place]) >> quad & 1) << 4;
  if (bits == 6) return low | (static_cast<unsigned>(unit[kHighBits + quad / 4 * 64 + place]) >> (quad % 4 * 2) & 3) << 4;
  return low;
}

// --- four inputs of sixteen outputs ---------------------------------------------------------------------------------

typedef uint8_t ByteReg __attribute__((vector_size(kWidth * 4)));
typedef int16_t PairReg16 __attribute__((vector_size(kWidth * 4)));
typedef uint16_t WordReg16 __attribute__((vector_size(kWidth * 4)));

struct Bytes {
  ByteReg part[kParts];
};
struct Pairs {  // two sums of two products for each output
  PairReg16 part[kParts];
};

PS_INLINE Bytes load_quad(const uint8_t* from) {
  Bytes to;
  PS_EACH_PART __builtin_memcpy(&to.part[i], from + i * kWidth * 4, kWidth * 4);
  return to;
}

// The same four inputs for every output.
PS_INLINE Bytes splat_quad(const int8_t* from) {
  Bytes to;
  const U16 four = splat_word(load_cell(from));
  PS_EACH_PART to.part[i] = (ByteReg)four.part[i];
  return to;
}

// Moves bits of bytes to their place, below which `mask` keeps them: up for a positive `by`.
template <int kBy>
PS_INLINE Bytes moved(const Bytes& from, uint8_t mask) {
  Bytes to;
  PS_EACH_PART {
    const WordReg16 words = (WordReg16)from.part[i];
    if constexpr (kBy >= 0) to.part[i] = (ByteReg)(words << kBy) & (mask - ByteReg{});
    if constexpr (kBy < 0) to.part[i] = (ByteReg)(words >> -kBy) & (mask - ByteReg{});
  }
  return to;
}

PS_INLINE Bytes operator|(const Bytes& a, const Bytes& b) {
  Bytes to;
  PS_EACH_PART to.part[i] = a.part[i] | b.part[i];
  return to;
}

// Codes that are integers from 0 on, but for the weight's offset.
template <int kBits>
struct LinearCodes {
  static constexpr bool kSigned = false;
  static constexpr int kRun = kBits == 4 ? 8 : kBits == 5 ? 4 : 2;  // quads whose products with inputs fit 16 bits

  explicit PS_INLINE LinearCodes(const IntegerCodes&) {}

  template <int kQuad>
  PS_INLINE Bytes quad(const uint8_t* unit) const {
    const Bytes low = moved<kQuad % 2 == 0 ? 0 : -4>(load_quad(unit + kQuad / 2 * 64), 15);
    if constexpr (kBits == 5) return low | moved<4 - kQuad>(load_quad(unit + kHighBits), 16);
    if constexpr (kBits == 6) return low | moved<4 - kQuad % 4 * 2>(load_quad(unit + kHighBits + kQuad / 4 * 64), 48);
    return low;
  }
};

// Integers of 8 bits.
struct ByteCodes {
  static constexpr bool kSigned = true;
  static constexpr int kRun = 1;

  explicit PS_INLINE ByteCodes(const IntegerCodes&) {}

  template <int kQuad>
  PS_INLINE Bytes quad(const uint8_t* unit) const { return load_quad(unit + kQuad * 64); }
};

// Codes of 4 bits for any integers.
struct TableCodes {
  static constexpr bool kSigned = true;
  static constexpr int kRun = 1;
  const int8_t* table;

  explicit PS_INLINE TableCodes(const IntegerCodes& codes) : table(codes.table) {}

  template <int kQuad>
  PS_INLINE Bytes quad(const uint8_t* unit) const {
    Bytes to = moved<kQuad % 2 == 0 ? 0 : -4>(load_quad(unit + kQuad / 2 * 64), 15);
#if defined(__AVX512BW__)
    const __m512i own = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
    to.part[0] = (ByteReg)_mm512_shuffle_epi8(own, (__m512i)to.part[0]);
#elif defined(__AVX2__)
    const __m256i own = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
    PS_EACH_PART to.part[i] = (ByteReg)_mm256_shuffle_epi8(own, (__m256i)to.part[i]);
#else
    PS_EACH_PART for (int j = 0; j < kWidth * 4; ++j) to.part[i][j] = static_cast<uint8_t>(table[to.part[i][j]]);
#endif
    return to;
  }
};

#if defined(__AVX512VNNI__)
constexpr bool kSumsQuads = true;
#else
constexpr bool kSumsQuads = false;
#endif

// What is subtracted from each integer by the weight, and because signed ones are multiplied as unsigned ones.
template <class Codes>
PS_INLINE int32_t whole_offset(const IntegerCodes& codes) {
  return codes.offset + (kSumsQuads && Codes::kSigned ? 128 : 0);
}

// --- products and sums ----------------------------------------------------------------------------------------------

// Products of weights (unsigned below 64, or signed) and inputs of -127 to 127, summed in pairs: 16 bits hold them.
template <bool kSigned>
PS_INLINE Pairs pair_products(const Bytes& weights, const Bytes& x) {
  Pairs to;
#if defined(__AVX512BW__)
  const __m512i w = (__m512i)weights.part[0], own = (__m512i)x.part[0];
  if constexpr (kSigned) {
    const __m512i turned = _mm512_mask_sub_epi8(own, _mm512_movepi8_mask(w), _mm512_setzero_si512(), own);
    to.part[0] = (PairReg16)_mm512_maddubs_epi16(_mm512_abs_epi8(w), turned);
  } else {
    to.part[0] = (PairReg16)_mm512_maddubs_epi16(w, own);
  }
#elif defined(__AVX2__)
  PS_EACH_PART {
    const __m256i w = (__m256i)weights.part[i], own = (__m256i)x.part[i];
    if constexpr (kSigned) {
      to.part[i] = (PairReg16)_mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(own, w));
    } else {
      to.part[i] = (PairReg16)_mm256_maddubs_epi16(w, own);
    }
  }
#else
  PS_EACH_PART for (int j = 0; j < kWidth * 2; ++j) {
    int sum = 0;
    for (int k = 2 * j; k < 2 * j + 2; ++k) {
      const int w = kSigned ? static_cast<int8_t>(weights.part[i][k]) : static_cast<int>(weights.part[i][k]);
      sum += w * static_cast<int8_t>(x.part[i][k]);
    }
    to.part[i][j] = static_cast<int16_t>(sum);
  }
#endif
  return to;
}

PS_INLINE void add_to(Pairs& to, const Pairs& from) { PS_EACH_PART to.part[i] += from.part[i]; }

// sum += both pair sums of every output, each times its factor.
PS_INLINE void add_pairs(I16& sum, const Pairs& pairs, const Pairs& factors) {
#if defined(__AVX512BW__)
  sum.part[0] += (IntReg)_mm512_madd_epi16((__m512i)pairs.part[0], (__m512i)factors.part[0]);
#elif defined(__AVX2__)
  PS_EACH_PART sum.part[i] += (IntReg)_mm256_madd_epi16((__m256i)pairs.part[i], (__m256i)factors.part[i]);
#else
  PS_EACH_PART for (int j = 0; j < kWidth; ++j)
    sum.part[i][j] += pairs.part[i][2 * j] * factors.part[i][2 * j] + pairs.part[i][2 * j + 1] * factors.part[i][2 * j + 1];
#endif
}

// a * b of integers of 16 bits, as which a lane of `a` lies.
PS_INLINE I16 times(const I16& a, int b) {
  I16 to;
#if defined(__AVX512BW__)
  to.part[0] = (IntReg)_mm512_madd_epi16((__m512i)a.part[0], _mm512_set1_epi32(b & 0xFFFF));
#elif defined(__AVX2__)
  PS_EACH_PART to.part[i] = (IntReg)_mm256_madd_epi16((__m256i)a.part[i], _mm256_set1_epi32(b & 0xFFFF));
#else
  PS_EACH_PART to.part[i] = a.part[i] * b;
#endif
  return to;
}

PS_INLINE I16 load_integers(const uint8_t* from, bool is_signed) {
  I16 to = load_bytes(from);
  if (is_signed) PS_EACH_PART to.part[i] = to.part[i] << 24 >> 24;
  return to;
}

// Factors of one.
struct NoFactor {
  Pairs pairs;

  PS_INLINE NoFactor() { PS_EACH_PART pairs.part[i] = 1 - PairReg16{}; }
  PS_INLINE I16 scaled(const I16& sum) const { return sum; }
};

// Integer scales of sixteen outputs.
template <bool kSigned>
struct ScaleFactor {
  I16 scales;
  Pairs pairs;

  explicit PS_INLINE ScaleFactor(const uint8_t* from) : scales(load_integers(from, kSigned)) {
#if defined(__AVX2__) && !defined(__AVX512BW__)
    const __m128i own = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    const __m128i twice[2] = {_mm_unpacklo_epi8(own, own), _mm_unpackhi_epi8(own, own)};
    PS_EACH_PART pairs.part[i] = (PairReg16)(kSigned ? _mm256_cvtepi8_epi16(twice[i]) : _mm256_cvtepu8_epi16(twice[i]));
#else
    PS_EACH_PART pairs.part[i] = (PairReg16)((scales.part[i] & 0xFFFF) | scales.part[i] << 16);
#endif
  }
#if defined(__AVX512VNNI__)
  PS_INLINE I16 scaled(const I16& sum) const {
    I16 to;
    to.part[0] = sum.part[0] * scales.part[0];
    return to;
  }
#endif
};

// sum[m] += factor * the products of quads [kFirst, kFirst + kCount) of a unit and each row's inputs, which begin with the
// unit's.  Signed integers are multiplied as unsigned ones where the instruction wants that (`whole_offset`).
template <class Codes, int kFirst, int kCount, int M, class Factor>
PS_INLINE void add_products(I16 (&sum)[M], const Factor& factor, const Codes& codes, const uint8_t* unit, const int8_t* x,
                            size_t x_stride) {
#if defined(__AVX512VNNI__)
  I16 own[M];
  for (int m = 0; m < M; ++m) own[m] = splat_int(0);
  const auto each = [&]<int kQuad>() __attribute__((always_inline)) {
    __m512i weights = (__m512i)codes.template quad<kQuad>(unit).part[0];
    if constexpr (Codes::kSigned) weights = _mm512_xor_si512(weights, _mm512_set1_epi8(static_cast<char>(0x80)));
    _Pragma("GCC unroll 8") for (int m = 0; m < M; ++m) {
      const __m512i four = (__m512i)splat_quad(x + static_cast<size_t>(m) * x_stride + kQuad * kQuadInputs).part[0];
      own[m].part[0] = (IntReg)_mm512_dpbusd_epi32((__m512i)own[m].part[0], weights, four);
    }
  };
  [&]<int... kEach>(std::integer_sequence<int, kEach...>) {
    (each.template operator()<kFirst + kEach>(), ...);
  }(std::make_integer_sequence<int, kCount>{});
  for (int m = 0; m < M; ++m) sum[m] = sum[m] + factor.scaled(own[m]);
#else
  Pairs own[M];
  const auto each = [&]<int kQuad>() __attribute__((always_inline)) {
    constexpr int kIndex = kQuad - kFirst;
    const Bytes weights = codes.template quad<kQuad>(unit);
    _Pragma("GCC unroll 8") for (int m = 0; m < M; ++m) {
      const Bytes four = splat_quad(x + static_cast<size_t>(m) * x_stride + kQuad * kQuadInputs);
      const Pairs products = pair_products<Codes::kSigned>(weights, four);
      if constexpr (kIndex % Codes::kRun == 0) own[m] = products;
      if constexpr (kIndex % Codes::kRun != 0) add_to(own[m], products);
      if constexpr (kIndex % Codes::kRun == Codes::kRun - 1 || kIndex == kCount - 1) add_pairs(sum[m], own[m], factor.pairs);
    }
  };
  [&]<int... kEach>(std::integer_sequence<int, kEach...>) {
    (each.template operator()<kFirst + kEach>(), ...);
  }(std::make_integer_sequence<int, kCount>{});
#endif
}

}  // namespace
