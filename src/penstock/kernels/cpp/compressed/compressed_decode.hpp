// One block of compressed weights to cells: two steps of sixteen pairs of bf16.
//
// With AVX512-VBMI2 it stays in registers: the planes are masks, a masked addition of bytes makes an exponent, expansion
// puts the escapes in their places, and two interleavings of bytes make the operands of `vdpbf16ps`.  With AVX2 the bits
// of a plane become masks of bytes, and escapes are written over the cells that lie in memory by then.
#pragma once

#include "compressed/compressed.hpp"
#include "families/simd.hpp"

namespace {

using namespace penstock;

PS_INLINE uint64_t load_word(const uint8_t* from) {
  uint64_t word;
  __builtin_memcpy(&word, from, 8);
  return word;
}

// Bit i set: weight i is an escape.
PS_INLINE uint64_t escapes_of(const uint8_t* planes) {
  return ~(load_word(planes) | load_word(planes + 8) | load_word(planes + 16));
}

#if defined(__AVX512VBMI2__)
constexpr bool kInRegisters = true;

struct CodeRegs {
  __m512i base, flip, step, two_steps, top;

  CodeRegs() = default;
  explicit PS_INLINE CodeRegs(const PanelCode& code)
      : base(_mm512_set1_epi8(static_cast<char>(code.base))),
        flip(_mm512_set1_epi8(static_cast<char>(0x80))),
        step(_mm512_set1_epi8(static_cast<char>(code.step))),
        two_steps(_mm512_set1_epi8(static_cast<char>(code.step * 2))),
        top(flip) {}
};

// The two steps of a block; `escapes` moves on.
PS_INLINE void decode_block(const BlockRef& block, const CodeRegs& code, const uint8_t*& escapes, U16& first,
                            U16& second) {
  const uint64_t* plane = reinterpret_cast<const uint64_t*>(block.planes);
  const uint64_t escaped = escapes_of(block.planes);
  __m512i exponent = _mm512_mask_add_epi8(code.base, _load_mask64((__mmask64*)plane), code.base, code.flip);
  exponent = _mm512_mask_add_epi8(exponent, _load_mask64((__mmask64*)plane + 1), exponent, code.step);
  exponent = _mm512_mask_add_epi8(exponent, _load_mask64((__mmask64*)plane + 2), exponent, code.two_steps);
  __m512i next = _mm512_loadu_si512(escapes);
  asm("" : "+v"(next));  // expansion out of memory is many times slower than out of a register
  exponent = _mm512_mask_expand_epi8(exponent, _cvtu64_mask64(escaped), next);
  escapes += __builtin_popcountll(escaped);
  const __m512i byte = _mm512_loadu_si512(block.bytes);
  const __m512i low = _mm512_ternarylogic_epi32(exponent, code.top, byte, 0xE2);   // top ? exponent : byte
  const __m512i high = _mm512_ternarylogic_epi32(exponent, code.top, byte, 0xB8);  // top ? byte : exponent
  first.part[0] = (WordReg)_mm512_unpacklo_epi8(low, high);
  second.part[0] = (WordReg)_mm512_unpackhi_epi8(low, high);
}

PS_INLINE void decode_to(const BlockRef& block, const CodeRegs& code, const uint8_t*& escapes, uint32_t* cells) {
  U16 first, second;
  decode_block(block, code, escapes, first, second);
  store(cells, first);
  store(cells + 16, second);
}
#else
constexpr bool kInRegisters = false;

// A bf16 number, from a rotated exponent and a byte of sign and mantissa.
PS_INLINE uint16_t join_bytes(unsigned exponent, unsigned byte) {
  return static_cast<uint16_t>((exponent & 0x80) | (byte & 0x7F) | (exponent & 0x7F) << 8 | (byte & 0x80) << 8);
}

#if defined(__AVX2__)
struct CodeRegs {
  __m256i base, step, two_steps;

  CodeRegs() = default;
  explicit PS_INLINE CodeRegs(const PanelCode& code)
      : base(_mm256_set1_epi8(static_cast<char>(code.base))),
        step(_mm256_set1_epi8(static_cast<char>(code.step))),
        two_steps(_mm256_set1_epi8(static_cast<char>(code.step * 2))) {}
};

// Bits of a plane as bytes of ones or zeros.
PS_INLINE __m256i mask_of(const uint8_t* bits) {
  int32_t word;
  __builtin_memcpy(&word, bits, 4);
  const __m256i order = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
  const __m256i bit = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201u));
  const __m256i own = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(word), order), bit);
  return _mm256_cmpeq_epi8(own, bit);
}

PS_INLINE void decode_to(const BlockRef& block, const CodeRegs& code, const uint8_t*& escapes, uint32_t* cells) {
  const __m256i top = _mm256_set1_epi8(static_cast<char>(0x80));
  _Pragma("GCC unroll 2") for (int half = 0; half < 2; ++half) {
    const uint8_t* plane = block.planes + half * 4;
    __m256i exponent = _mm256_xor_si256(code.base, _mm256_and_si256(mask_of(plane), top));
    exponent = _mm256_add_epi8(exponent, _mm256_and_si256(mask_of(plane + 8), code.step));
    exponent = _mm256_add_epi8(exponent, _mm256_and_si256(mask_of(plane + 16), code.two_steps));
    const __m256i byte = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(block.bytes + half * 32));
    const __m256i low = _mm256_or_si256(_mm256_and_si256(top, exponent), _mm256_andnot_si256(top, byte));
    const __m256i high = _mm256_or_si256(_mm256_and_si256(top, byte), _mm256_andnot_si256(top, exponent));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(cells) + half, _mm256_unpacklo_epi8(low, high));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(cells + 16) + half, _mm256_unpackhi_epi8(low, high));
  }
  for (uint64_t left = escapes_of(block.planes); left != 0; left &= left - 1) {
    const int i = __builtin_ctzll(left);
    const uint16_t value = join_bytes(*escapes++, block.bytes[i]);
    const int place = i % 16 / 8 * 32 + i / 16 * 8 + i % 8;
    __builtin_memcpy(reinterpret_cast<char*>(cells) + place * 2, &value, 2);
  }
}
#else
struct Spread {
  uint64_t of[256];

  constexpr Spread() : of() {
    for (int byte = 0; byte < 256; ++byte)
      for (int bit = 0; bit < 8; ++bit) of[byte] |= static_cast<uint64_t>(byte >> bit & 1) << (bit * 8);
  }
};
constexpr Spread kSpread;  // the bits of a byte as the bytes of a word

constexpr uint64_t kOnes = 0x0101010101010101u;

struct CodeRegs {
  uint64_t top, upper;
  bool descends;

  CodeRegs() = default;
  explicit PS_INLINE CodeRegs(const PanelCode& code)
      : top((code.base >> 7) * kOnes), upper((code.base & 0x7F) * kOnes), descends(code.step != 1) {}
};

PS_INLINE void decode_to(const BlockRef& block, const CodeRegs& code, const uint8_t*& escapes, uint32_t* cells) {
  alignas(64) uint8_t exponent[64];
  for (int i = 0; i < 8; ++i) {
    const uint64_t gain = kSpread.of[block.planes[8 + i]] + 2 * kSpread.of[block.planes[16 + i]];
    const uint64_t upper = code.descends ? code.upper - gain : code.upper + gain;
    const uint64_t eight = (upper & (0x7F * kOnes)) | (code.top ^ kSpread.of[block.planes[i]]) << 7;
    __builtin_memcpy(exponent + i * 8, &eight, 8);
  }
  for (uint64_t left = escapes_of(block.planes); left != 0; left &= left - 1)
    exponent[__builtin_ctzll(left)] = *escapes++;
  uint16_t* to = reinterpret_cast<uint16_t*>(cells);
  for (int lane = 0; lane < 4; ++lane)
    for (int step = 0; step < 2; ++step)
      for (int i = 0; i < 8; ++i) {
        const unsigned e = exponent[lane * 16 + step * 8 + i], b = block.bytes[lane * 16 + step * 8 + i];
        to[step * 32 + lane * 8 + i] = join_bytes(e, b);
      }
}
#endif
#endif

// Asks for the lines of a chunk: some at once, then one a block.  Locality 3 is the first-level cache, 2 the second.
template <int kLocality>
struct Fetcher {
  const uint8_t* line;

  explicit PS_INLINE Fetcher(const uint8_t* chunk) : line(chunk) {
    constexpr long kLines = kChunkBlocks * kBlockBytes / 64;
    for (long i = kChunkBlocks; i < kLines; ++i) __builtin_prefetch(chunk + i * 64, 0, kLocality);
  }
  PS_INLINE void one_block(long offset = 0) const { __builtin_prefetch(line + offset, 0, kLocality); }
  PS_INLINE void next_block() { line += 64; }
};

// Blocks [from, to) of a panel to cells [2 * (to - from)][16]; returns where its escapes go on.  Asks for the blocks that
// are `ahead` further, in this panel or behind it.
PS_INLINE const uint8_t* decode_blocks(const CompressedView& w, long panel, long from, long to, const uint8_t* escapes,
                                       uint32_t* cells, long ahead) {
  const CodeRegs code(w.codes[panel]);
  const uint8_t* chunk_ahead = w.panel(panel) + (from + ahead) * kBlockBytes;
  __builtin_prefetch(escapes + 128, 0, 3);
  while (from < to) {
    BlockRef block = w.block(panel, from);
    const long next = (from / kChunkBlocks + 1) * kChunkBlocks, end = next < to ? next : to;
    Fetcher<3> fetch(chunk_ahead);
    chunk_ahead += (end - from) * kBlockBytes;
    for (; from < end; ++from, cells += 32) {
      decode_to(block, code, escapes, cells);
      fetch.one_block();
      fetch.next_block();
      block.planes += kPlaneBytes;
      block.bytes += kMantissaBytes;
    }
  }
  return escapes;
}

}  // namespace
