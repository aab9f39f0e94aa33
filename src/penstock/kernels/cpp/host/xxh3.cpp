#include "host/xxh3.hpp"

#include <cstring>

#if defined(PENSTOCK_X86)
#include <immintrin.h>
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // the compiler's own headers, in release 12
#endif

namespace penstock {
namespace {

constexpr uint64_t kPrime32[] = {0x9E3779B1u, 0x85EBCA77u, 0xC2B2AE3Du};
constexpr uint64_t kPrime64[] = {0x9E3779B185EBCA87u, 0xC2B2AE3D27D4EB4Fu, 0x165667B19E3779F9u, 0x85EBCA77C2B2AE63u,
                                 0x27D4EB2F165667C5u};
constexpr uint64_t kMix1 = 0x165667919E3779F9u, kMix2 = 0x9FB21C651E98DF25u;

constexpr size_t kSecretBytes = 192, kStripe = 64, kStripesABlock = 16;
constexpr size_t kSmallPage = 4 * kStripe;  // below it a page is hashed from a copy on the stack
constexpr size_t kAhead = 1024;             // bytes that are fetched before they are copied
alignas(64) constexpr uint8_t kSecret[kSecretBytes] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d,
    0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0,
    0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0,
    0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b,
    0x1b, 0x53, 0x2e, 0xa3, 0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac,
    0xd8, 0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51,
    0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34,
    0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb, 0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49,
    0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e, 0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8,
    0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b,
    0x40, 0x7e};

struct U128 {
  uint64_t low, high;
};

// Words are little-endian on every processor that this is built for.
uint32_t read32(const uint8_t* from) {
  uint32_t word;
  std::memcpy(&word, from, 4);
  return word;
}
uint64_t read64(const uint8_t* from) {
  uint64_t word;
  std::memcpy(&word, from, 8);
  return word;
}
uint64_t secret64(size_t at) { return read64(kSecret + at); }

U128 multiply(uint64_t a, uint64_t b) {
  const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
  return {static_cast<uint64_t>(product), static_cast<uint64_t>(product >> 64)};
}
uint64_t fold(uint64_t a, uint64_t b) {
  const U128 product = multiply(a, b);
  return product.low ^ product.high;
}
uint64_t avalanche(uint64_t h) {
  h = (h ^ h >> 37) * kMix1;
  return h ^ h >> 32;
}
uint64_t avalanche64(uint64_t h) {
  h = (h ^ h >> 33) * kPrime64[1];
  h = (h ^ h >> 29) * kPrime64[2];
  return h ^ h >> 32;
}

U128 up_to_3(const uint8_t* in, size_t n) {
  const uint32_t low = static_cast<uint32_t>(in[0]) << 16 | static_cast<uint32_t>(in[n >> 1]) << 24 | in[n - 1] |
                       static_cast<uint32_t>(n) << 8;
  const uint32_t swapped = __builtin_bswap32(low), high = swapped << 13 | swapped >> 19;
  return {avalanche64(low ^ (read32(kSecret) ^ read32(kSecret + 4))),
          avalanche64(high ^ (read32(kSecret + 8) ^ read32(kSecret + 12)))};
}

U128 up_to_8(const uint8_t* in, size_t n) {
  const uint64_t word = read32(in) + (static_cast<uint64_t>(read32(in + n - 4)) << 32);
  U128 m = multiply(word ^ (secret64(16) ^ secret64(24)), kPrime64[0] + (n << 2));
  m.high += m.low << 1;
  m.low ^= m.high >> 3;
  m.low = (m.low ^ m.low >> 35) * kMix2;
  return {m.low ^ m.low >> 28, avalanche(m.high)};
}

U128 up_to_16(const uint8_t* in, size_t n) {
  const uint64_t low = read64(in), high = read64(in + n - 8) ^ (secret64(48) ^ secret64(56));
  U128 m = multiply(low ^ read64(in + n - 8) ^ (secret64(32) ^ secret64(40)), kPrime64[0]);
  m.low += static_cast<uint64_t>(n - 1) << 54;
  m.high += high + (high & 0xFFFFFFFFu) * (kPrime32[1] - 1);
  m.low ^= __builtin_bswap64(m.high);
  U128 h = multiply(m.low, kPrime64[1]);
  h.high += m.high * kPrime64[1];
  return {avalanche(h.low), avalanche(h.high)};
}

uint64_t mix16(const uint8_t* in, size_t at, uint64_t seed = 0) {
  return fold(read64(in) ^ (secret64(at) + seed), read64(in + 8) ^ (secret64(at + 8) - seed));
}

void mix32(U128& acc, const uint8_t* one, const uint8_t* two, size_t at) {
  acc.low = (acc.low + mix16(one, at)) ^ (read64(two) + read64(two + 8));
  acc.high = (acc.high + mix16(two, at + 16)) ^ (read64(one) + read64(one + 8));
}

U128 finish_middle(const U128& acc, size_t n) {
  return {avalanche(acc.low + acc.high),
          0 - avalanche(acc.low * kPrime64[0] + acc.high * kPrime64[3] + n * kPrime64[1])};
}

U128 up_to_128(const uint8_t* in, size_t n) {
  U128 acc{n * kPrime64[0], 0};
  for (size_t i = (n - 1) / 32; i > 0; --i) mix32(acc, in + 16 * i, in + n - 16 * (i + 1), 32 * i);
  mix32(acc, in, in + n - 16, 0);
  return finish_middle(acc, n);
}

U128 up_to_240(const uint8_t* in, size_t n) {
  U128 acc{n * kPrime64[0], 0};
  for (size_t i = 0; i < 128; i += 32) mix32(acc, in + i, in + i + 16, i);
  acc = {avalanche(acc.low), avalanche(acc.high)};
  for (size_t i = 160; i <= n; i += 32) mix32(acc, in + i - 32, in + i - 16, 3 + i - 160);
  mix32(acc, in + n - 16, in + n - 32, 136 - 17 - 16);
  return finish_middle(acc, n);
}

// --- long inputs -----------------------------------------------------------------------------------------------------

// Folds `stripes` of 64 bytes into the eight accumulators, the first of which is stripe `first` of the input; stripe s
// takes the secret from byte 8 s on, and every sixteenth is followed by a scramble.  What is folded is also stored at
// `out` where the fold copies: every word is loaded once, so what is hashed is what is stored.
using Fold = void (*)(uint64_t* acc, const uint8_t* in, uint8_t* out, size_t first, size_t stripes);

template <bool kCopies>
void fold_anywhere(uint64_t* acc, const uint8_t* in, uint8_t* out, size_t first, size_t stripes) {
  for (size_t s = first; s < first + stripes; ++s, in += kStripe, out += kCopies ? kStripe : 0) {
    const size_t at = s % kStripesABlock * 8;
    uint8_t stripe[kStripe];
    std::memcpy(stripe, in, kStripe);
    if constexpr (kCopies) std::memcpy(out, stripe, kStripe);
    for (size_t i = 0; i < 8; ++i) {
      const uint64_t word = read64(stripe + 8 * i), key = word ^ secret64(at + 8 * i);
      acc[i ^ 1] += word;
      acc[i] += (key & 0xFFFFFFFFu) * (key >> 32);
    }
    if (s % kStripesABlock == kStripesABlock - 1)
      for (size_t i = 0; i < 8; ++i)
        acc[i] = (acc[i] ^ acc[i] >> 47 ^ secret64(kSecretBytes - kStripe + 8 * i)) * kPrime32[0];
  }
}

#if defined(PENSTOCK_X86)
template <bool kCopies>
__attribute__((target("avx512f"))) void fold_avx512(uint64_t* acc, const uint8_t* in, uint8_t* out, size_t first,
                                                    size_t stripes) {
  const __m512i prime = _mm512_set1_epi32(static_cast<int>(kPrime32[0]));
  __m512i sum = _mm512_loadu_si512(acc);
  for (size_t s = first; s < first + stripes; ++s, in += kStripe, out += kCopies ? kStripe : 0) {
    const __m512i word = _mm512_loadu_si512(in);
    if constexpr (kCopies) {
      __builtin_prefetch(in + kAhead);
      _mm512_storeu_si512(out, word);
    }
    const __m512i key = _mm512_xor_si512(word, _mm512_loadu_si512(kSecret + s % kStripesABlock * 8));
    const __m512i product = _mm512_mul_epu32(key, _mm512_srli_epi64(key, 32));
    sum = _mm512_add_epi64(product, _mm512_add_epi64(sum, _mm512_shuffle_epi32(word, _MM_PERM_BADC)));
    if (s % kStripesABlock == kStripesABlock - 1) {
      const __m512i secret = _mm512_loadu_si512(kSecret + kSecretBytes - kStripe);
      const __m512i mixed = _mm512_xor_si512(_mm512_xor_si512(sum, _mm512_srli_epi64(sum, 47)), secret);
      const __m512i upper = _mm512_mul_epu32(_mm512_srli_epi64(mixed, 32), prime);
      sum = _mm512_add_epi64(_mm512_mul_epu32(mixed, prime), _mm512_slli_epi64(upper, 32));
    }
  }
  _mm512_storeu_si512(acc, sum);
}

template <bool kCopies>
__attribute__((target("avx2"))) void fold_avx2(uint64_t* acc, const uint8_t* in, uint8_t* out, size_t first,
                                               size_t stripes) {
  const __m256i prime = _mm256_set1_epi32(static_cast<int>(kPrime32[0]));
  __m256i sums[2];
  std::memcpy(sums, acc, sizeof sums);
  for (size_t s = first; s < first + stripes; ++s, in += kStripe, out += kCopies ? kStripe : 0) {
    if constexpr (kCopies) __builtin_prefetch(in + kAhead);
    for (size_t half = 0; half < 2; ++half) {
      __m256i& sum = sums[half];
      const uint8_t* secret = kSecret + half * 32;
      const __m256i word = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in) + half);
      if constexpr (kCopies) _mm256_storeu_si256(reinterpret_cast<__m256i*>(out) + half, word);
      const __m256i own = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(secret + s % kStripesABlock * 8));
      const __m256i key = _mm256_xor_si256(word, own);
      const __m256i product = _mm256_mul_epu32(key, _mm256_srli_epi64(key, 32));
      sum = _mm256_add_epi64(product, _mm256_add_epi64(sum, _mm256_shuffle_epi32(word, _MM_SHUFFLE(1, 0, 3, 2))));
      if (s % kStripesABlock == kStripesABlock - 1) {
        const __m256i last = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(secret + kSecretBytes - kStripe));
        const __m256i mixed = _mm256_xor_si256(_mm256_xor_si256(sum, _mm256_srli_epi64(sum, 47)), last);
        const __m256i upper = _mm256_mul_epu32(_mm256_srli_epi64(mixed, 32), prime);
        sum = _mm256_add_epi64(_mm256_mul_epu32(mixed, prime), _mm256_slli_epi64(upper, 32));
      }
    }
  }
  std::memcpy(acc, sums, sizeof sums);
}
#endif

template <bool kCopies>
Fold best_fold() {
#if defined(PENSTOCK_X86)
  if (__builtin_cpu_supports("avx512f")) return fold_avx512<kCopies>;
  if (__builtin_cpu_supports("avx2")) return fold_avx2<kCopies>;
#endif
  return fold_anywhere<kCopies>;
}

uint64_t merge(const uint64_t* acc, size_t at, uint64_t start) {
  for (size_t i = 0; i < 4; ++i)
    start += fold(acc[2 * i] ^ secret64(at + 16 * i), acc[2 * i + 1] ^ secret64(at + 16 * i + 8));
  return avalanche(start);
}

// A long input in pieces: whole stripes first, then everything that is left.
class Long {
 public:
  // `out` null: nothing is copied.  After these stripes at least one more byte must follow.
  void stripes(const uint8_t* in, uint8_t* out, size_t count) {
    static const Fold fold_only = best_fold<false>(), fold_and_copy = best_fold<true>();
    (out == nullptr ? fold_only : fold_and_copy)(acc_, in, out, folded_, count);
    folded_ += count;
  }

  size_t folded() const { return folded_; }

  // `last`: the last 64 bytes of an input of `n` bytes, which take a part of the secret of their own.
  U128 finish(const uint8_t* last, size_t n) {
    for (size_t i = 0; i < 8; ++i) {
      const uint64_t word = read64(last + 8 * i), key = word ^ secret64(kSecretBytes - kStripe - 7 + 8 * i);
      acc_[i ^ 1] += word;
      acc_[i] += (key & 0xFFFFFFFFu) * (key >> 32);
    }
    return {merge(acc_, 11, n * kPrime64[0]), merge(acc_, kSecretBytes - kStripe - 11, ~(n * kPrime64[1]))};
  }

 private:
  uint64_t acc_[8] = {kPrime32[2], kPrime64[0], kPrime64[1], kPrime64[2],
                      kPrime64[3], kPrime32[1], kPrime64[4], kPrime32[0]};
  size_t folded_ = 0;
};

U128 of_any_length(const uint8_t* in, size_t n) {
  Long input;
  input.stripes(in, nullptr, (n - 1) / kStripe);
  return input.finish(in + n - kStripe, n);
}

U128 digest(const uint8_t* in, size_t n) {
  if (n > 240) return of_any_length(in, n);
  if (n > 128) return up_to_240(in, n);
  if (n > 16) return up_to_128(in, n);
  if (n > 8) return up_to_16(in, n);
  if (n > 3) return up_to_8(in, n);
  if (n > 0) return up_to_3(in, n);
  return {avalanche64(secret64(64) ^ secret64(72)), avalanche64(secret64(80) ^ secret64(88))};
}

Checksum as_checksum(const U128& h) {
  const uint64_t words[2] = {__builtin_bswap64(h.high), __builtin_bswap64(h.low)};
  Checksum result;
  std::memcpy(result.data(), words, 16);
  return result;
}

}  // namespace

Checksum xxh3_128(const void* data, size_t bytes) {
  return as_checksum(digest(static_cast<const uint8_t*>(data), bytes));
}

uint64_t xxh3_64(const uint8_t* data, size_t bytes, uint64_t seed) {
  uint64_t sum = bytes * kPrime64[0];
  for (size_t i = 0; i < 4; ++i)
    sum += mix16(data + 16 * i, 32 * i, seed) + mix16(data + bytes - 16 * (i + 1), 32 * i + 16, seed);
  return avalanche(sum);
}

Checksum xxh3_128_sealed(const uint8_t* page, uint8_t* into, size_t bytes, const uint8_t* suffix, size_t suffix_bytes) {
  uint8_t end[kSmallPage + kMaxSuffix];  // the whole of a small page, or the last stripe of a large one and what is left
  const size_t whole = bytes < kSmallPage ? 0 : bytes / kStripe, rest = bytes - whole * kStripe;
  Long input;
  uint8_t* to = end;
  if (whole > 0) {
    input.stripes(page, into, whole);
    std::memcpy(end, (into == nullptr ? page : into) + (whole - 1) * kStripe, kStripe);
    to += kStripe;
  }
  std::memcpy(to, page + whole * kStripe, rest);
  if (into != nullptr) std::memcpy(into + whole * kStripe, to, rest);
  std::memcpy(to + rest, suffix, suffix_bytes);
  to += rest + suffix_bytes;
  if (whole == 0) return as_checksum(digest(end, bytes + suffix_bytes));
  const size_t left = rest + suffix_bytes;
  const size_t more = (left - 1) / kStripe;
  input.stripes(end + kStripe, nullptr, more);
  return as_checksum(input.finish(to - kStripe, bytes + suffix_bytes));
}

struct GrowingPage::Read {
  Long input;
};

GrowingPage::GrowingPage(const uint8_t* page, size_t bytes)
    : page_(page), bytes_(bytes), read_(std::make_unique<Read>()) {}
GrowingPage::~GrowingPage() = default;
GrowingPage::GrowingPage(GrowingPage&&) noexcept = default;

void GrowingPage::grew(size_t there) {
  if (bytes_ < kSmallPage) return;
  const size_t before = read_->input.folded();
  read_->input.stripes(page_ + before * kStripe, nullptr, there / kStripe - before);
}

Checksum GrowingPage::sealed(const uint8_t* suffix, size_t suffix_bytes) {
  if (bytes_ < kSmallPage) return xxh3_128_sealed(page_, nullptr, bytes_, suffix, suffix_bytes);
  grew(bytes_);
  uint8_t end[2 * kStripe + kMaxSuffix];  // the last whole stripe, what is left, the suffix
  const size_t whole = bytes_ / kStripe, rest = bytes_ - whole * kStripe, left = rest + suffix_bytes;
  std::memcpy(end, page_ + (whole - 1) * kStripe, kStripe + rest);
  std::memcpy(end + kStripe + rest, suffix, suffix_bytes);
  read_->input.stripes(end + kStripe, nullptr, (left - 1) / kStripe);
  return as_checksum(read_->input.finish(end + left, bytes_ + suffix_bytes));
}

}  // namespace penstock
