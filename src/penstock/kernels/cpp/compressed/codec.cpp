#include "compressed/codec.hpp"

#include <cstring>

namespace penstock {
namespace {

// Output and input (inside the block) of the weight that has bit and byte `i`: the order in which the kernels'
// interleaving of bytes leaves two steps of sixteen pairs.
constexpr long output_of(int i) { return i / 16 * 4 + i % 8 / 2; }
constexpr long input_of(int i) { return i % 16 / 8 * 2 + i % 2; }

uint8_t rotate_right(int exponent) { return static_cast<uint8_t>(exponent >> 1 | (exponent & 1) << 7); }

struct Escapes {
  uint8_t* next;
  uint32_t count;
};

void encode_block(const uint16_t (&weights)[64], const uint8_t (&code_of)[256], uint8_t* planes, uint8_t* bytes,
                  Escapes& escapes) {
  uint64_t plane[3] = {0, 0, 0};
  for (int i = 0; i < 64; ++i) {
    const int exponent = weights[i] >> 7 & 0xFF;
    const uint64_t code = code_of[exponent];
    bytes[i] = static_cast<uint8_t>((weights[i] >> 8 & 0x80) | (weights[i] & 0x7F));
    for (int p = 0; p < 3; ++p) plane[p] |= (code >> p & 1) << i;
    if (code == 0) escapes.next[escapes.count++] = rotate_right(exponent);
  }
  std::memcpy(planes, plane, kPlaneBytes);
}

}  // namespace

std::array<uint64_t, 256> count_exponents(const uint16_t* weights, size_t count) {
  std::array<std::array<uint64_t, 256>, 4> counts{};  // several, so that equal neighbors do not wait for each other
  size_t i = 0;
  for (; i + 4 <= count; i += 4)
    for (size_t j = 0; j < 4; ++j) ++counts[j][weights[i + j] >> 7 & 0xFF];
  for (; i < count; ++i) ++counts[0][weights[i] >> 7 & 0xFF];
  for (size_t e = 0; e < 256; ++e) counts[0][e] += counts[1][e] + counts[2][e] + counts[3][e];
  return counts[0];
}

bool is_sound(const ExponentCode& code) {
  if (code.step == 1) return code.base >= 0 && code.base <= 248 && code.base % 2 == 0;
  return code.step == -1 && code.base >= 7 && code.base <= 255 && code.base % 2 == 1;
}

PanelCode rotated(const ExponentCode& code) { return {rotate_right(code.base), static_cast<uint8_t>(code.step)}; }

void encode(const uint16_t* weights, long n, long k, const ExponentCode& code, uint8_t* blocks, uint8_t* escapes,
            uint32_t* counts) {
  uint8_t code_of[256] = {};
  for (int c = 1; c < 8; ++c) code_of[code.base + code.step * c] = static_cast<uint8_t>(c);
  const uint16_t padding = static_cast<uint16_t>((code.base + code.step) << 7);
  CompressedView view{};
  view.blocks = blocks;
  view.layout.n = n;
  view.layout.k = k;
  for (long panel = 0; panel < view.layout.panels(); ++panel) {
    Escapes own{escapes, 0};
    for (long b = 0; b < view.blocks_a_panel(); ++b) {
      uint16_t block[64];
      for (int i = 0; i < 64; ++i) {
        const long row = panel * 16 + output_of(i), column = b * kBlockColumns + input_of(i);
        block[i] = row < n && column < k ? weights[row * k + column] : padding;
      }
      const BlockRef to = view.block(panel, b);
      encode_block(block, code_of, const_cast<uint8_t*>(to.planes), const_cast<uint8_t*>(to.bytes), own);
    }
    counts[panel] = own.count;
    escapes += own.count;
  }
}

void sum_escapes(const CompressedView& weight, uint64_t* out) {
  out[0] = 0;
  for (long panel = 0; panel < weight.layout.panels(); ++panel) {
    uint64_t count = 0;
    for (long b = 0; b < weight.blocks_a_panel(); ++b) {
      uint64_t plane[3];
      std::memcpy(plane, weight.block(panel, b).planes, kPlaneBytes);
      count += static_cast<uint64_t>(__builtin_popcountll(~(plane[0] | plane[1] | plane[2])));
    }
    out[panel + 1] = out[panel] + count;
  }
}

}  // namespace penstock
