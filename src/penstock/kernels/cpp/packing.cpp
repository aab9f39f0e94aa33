#include "packing.hpp"

#include <cstring>
#include <stdexcept>

namespace penstock {
namespace {

uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

uint16_t to_bf16(uint32_t bits) {
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<uint16_t>((bits | 0x00400000u) >> 16);
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

uint32_t half_to_float_bits(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t exponent = (half >> 10) & 0x1Fu, fraction = half & 0x3FFu;
  if (exponent == 31) return sign | 0x7F800000u | (fraction << 13);
  if (exponent != 0) return sign | ((exponent + 112) << 23) | (fraction << 13);
  return sign | bits_of(static_cast<float>(fraction) * 0x1p-24f);
}

template <Source kSource>
uint32_t element_bits(const void* weight, size_t index) {
  if constexpr (kSource == Source::kBf16) return static_cast<uint32_t>(static_cast<const uint16_t*>(weight)[index]) << 16;
  if constexpr (kSource == Source::kFp16) return half_to_float_bits(static_cast<const uint16_t*>(weight)[index]);
  return static_cast<const uint32_t*>(weight)[index];
}

// The cell that begins at `index`; `pair`: its later half is there too.
template <Source kSource, int kPerCell>
uint32_t cell_of(const void* weight, size_t index, bool pair) {
  if constexpr (kSource == Source::kBf16 && kPerCell == 2) {
    uint32_t cell = 0;
    std::memcpy(&cell, static_cast<const uint16_t*>(weight) + index, pair ? 4 : 2);
    return cell;
  }
  const uint32_t early = element_bits<kSource>(weight, index);
  if constexpr (kPerCell == 1) return early;
  const uint32_t late = pair ? to_bf16(element_bits<kSource>(weight, index + 1)) : 0;
  return to_bf16(early) | late << 16;
}

// One panel, a few steps at a time so that the cells being written stay in the first-level cache.
template <Source kSource, int kPerCell>
void pack_panel(const void* weight, const PackedView& w, long panel, uint32_t* cells) {
  constexpr long kBlock = 64;
  for (int s = 0; s < w.segments; ++s)
    for (long from = w.step_begin[s]; from < w.step_begin[s + 1]; from += kBlock) {
      const long to = from + kBlock < w.step_begin[s + 1] ? from + kBlock : w.step_begin[s + 1];
      for (long lane = 0; lane < 16; ++lane) {
        const long n = panel * 16 + lane;
        for (long step = from; step < to; ++step) {
          const long k = w.k_begin[s] + (step - w.step_begin[s]) * kPerCell;
          const bool pair = k + 1 < w.k_begin[s + 1];
          const uint32_t cell =
              n < w.n ? cell_of<kSource, kPerCell>(weight, static_cast<size_t>(n) * w.k + k, pair) : 0;
          cells[step * 16 + lane] = cell;
        }
      }
    }
}

template <Source kSource>
void pack_from(const void* weight, const PackedView& w, uint32_t* cells) {
  for (long panel = 0; panel < w.panels(); ++panel) {
    uint32_t* own = cells + panel * w.steps() * 16;
    w.per_cell == 2 ? pack_panel<kSource, 2>(weight, w, panel, own) : pack_panel<kSource, 1>(weight, w, panel, own);
  }
}

}  // namespace

PackedView packed_layout(long n, long k, const long* ends, int segments, int per_cell) {
  if (n < 1 || k < 1) throw std::invalid_argument("a weight needs at least one row and one column");
  if (segments < 1 || segments > kMaxSegments || (segments & (segments - 1)) != 0)
    throw std::invalid_argument("K is cut into 1, 2, 4 or 8 segments");
  PackedView view{nullptr, n, k, segments, {0}, {0}, per_cell};
  for (int s = 0; s < segments; ++s) {
    if (ends[s] < view.k_begin[s] || ends[s] > k) throw std::invalid_argument("segment ends must ascend to K");
    view.k_begin[s + 1] = ends[s];
    view.step_begin[s + 1] = view.step_begin[s] + (ends[s] - view.k_begin[s] + per_cell - 1) / per_cell;
  }
  if (ends[segments - 1] != k) throw std::invalid_argument("the last segment must end at K");
  return view;
}

void pack(const void* weight, Source source, const PackedView& layout, uint32_t* cells) {
  switch (source) {
    case Source::kBf16: return pack_from<Source::kBf16>(weight, layout, cells);
    case Source::kFp16: return pack_from<Source::kFp16>(weight, layout, cells);
    case Source::kFp32: return pack_from<Source::kFp32>(weight, layout, cells);
  }
}

}  // namespace penstock
