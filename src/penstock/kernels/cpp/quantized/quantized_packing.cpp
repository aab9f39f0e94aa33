#include "quantized/quantized_packing.hpp"

#include <algorithm>
#include <cstring>

#include "quantized/quantized.hpp"

namespace penstock {
namespace {

void store_word(uint8_t* to, uint64_t word) {
  const auto low = static_cast<uint16_t>(word);
  std::memcpy(to, &low, 2);
}

// Of four 16-bit fields the lowest `kBits` each, one behind the other.
template <int kBits>
uint64_t joined(uint64_t fields) {
  constexpr int kGap = 16 - kBits;
  return fields | fields >> kGap | fields >> (2 * kGap) | fields >> (3 * kGap);
}

// 32 codes of one output into its place in a unit.
void pack_lane(const uint8_t* codes, int bits, int lane, uint8_t* unit) {
  if (bits == 8) {
    for (int k = 0; k < kUnitColumns; ++k)
      unit[k / 4 * 64 + lane / 4 * 16 + k / 2 % 2 * 8 + lane % 4 * 2 + k % 2] = codes[k];
    return;
  }
  uint64_t high[2] = {0, 0};  // of early and late inputs: the bits beyond four, a cell behind the other
  for (int quad = 0; quad < 4; ++quad) {
    uint64_t eight;
    std::memcpy(&eight, codes + quad * 8, 8);
    for (int late = 0; late < 2; ++late) {
      const uint64_t own = eight >> (8 * late) & 0x00FF00FF00FF00FFu;
      store_word(unit + quad * 64 + lane * 4 + late * 2, joined<4>(own & 0x000F000F000F000Fu));
      if (bits == 5) high[late] |= (joined<1>(own >> 4 & 0x0001000100010001u) & 15) << (quad * 4);
      if (bits == 6) high[late] |= (joined<2>(own >> 4 & 0x0003000300030003u) & 255) << (quad * 8);
    }
  }
  for (int late = 0; late < 2; ++late)
    for (int half = 0; half < bits - 4; ++half)
      store_word(unit + 256 + half * 64 + lane * 4 + late * 2, high[late] >> (16 * half));
}

// The same in quads: four inputs side by side for each output.
void pack_quad_lane(const uint8_t* codes, const uint8_t* bytes, int bits, int lane, uint8_t* unit) {
  for (int quad = 0; quad < 8; ++quad)
    for (int late = 0; late < 4; ++late) {
      const unsigned code = bytes[codes[quad * 4 + late]];
      const int place = lane * 4 + late;
      if (bits == 8) {
        unit[quad * 64 + place] = static_cast<uint8_t>(code);
        continue;
      }
      unit[quad / 2 * 64 + place] |= static_cast<uint8_t>((code & 15) << (quad % 2 * 4));
      if (bits == 5) unit[256 + place] |= static_cast<uint8_t>(code >> 4 << quad);
      if (bits == 6) unit[256 + quad / 4 * 64 + place] |= static_cast<uint8_t>(code >> 4 << (quad % 4 * 2));
    }
}

}  // namespace

void pack_codes(const uint8_t* codes, long rows, long k, int bits, uint8_t* to) {
  const long units = k / kUnitColumns;
  for (long row = 0; row < rows; ++row)
    for (long unit = 0; unit < units; ++unit)
      pack_lane(codes + row * k + unit * kUnitColumns, bits, static_cast<int>(row % 16),
                to + (row / 16 * units + unit) * 64 * bits);
}

void pack_quads(const uint8_t* codes, const uint8_t* bytes, long rows, long k, int bits, uint8_t* to) {
  const long units = k / kUnitColumns;
  std::memset(to, 0, static_cast<size_t>(rows / 16 * units * 64 * bits));
  for (long row = 0; row < rows; ++row)
    for (long unit = 0; unit < units; ++unit)
      pack_quad_lane(codes + row * k + unit * kUnitColumns, bytes, bits, static_cast<int>(row % 16),
                     to + (row / 16 * units + unit) * 64 * bits);
}

int zero_code_of(const uint16_t* values, int bits) {
  const uint16_t* const end = values + (1 << bits);
  const long zero = std::find(values, end, uint16_t{0}) - values;
  for (long code = 0; code < end - values; ++code) {
    const auto integer = static_cast<float>(code - zero);
    uint32_t pattern;
    std::memcpy(&pattern, &integer, 4);
    if (pattern != static_cast<uint32_t>(values[code]) << 16) return -1;
  }
  return static_cast<int>(zero);
}

}  // namespace penstock
