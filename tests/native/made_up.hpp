// Made-up data for the self-check, and checksums of what comes of them.
//
// With integers and exact arithmetic only: no library may make a difference.
#pragma once

#include <cstring>
#include <vector>

#include "families/dispatch.hpp"
#include "gemm/packing.hpp"

namespace {

using namespace penstock;

struct Checksum {
  uint64_t value = 0xCBF29CE484222325u;  // FNV-1a

  template <class T>
  void add(const std::vector<T>& data) {
    const auto* bytes = reinterpret_cast<const unsigned char*>(data.data());
    for (size_t i = 0; i < data.size() * sizeof(T); ++i) value = (value ^ bytes[i]) * 0x100000001B3u;
  }
};

// About bell-shaped, exactly representable: sums of four integers, scaled by a power of two.
std::vector<float> numbers(size_t count, uint64_t seed, float scale) {
  std::vector<float> made(count);
  uint64_t state = seed * 0x9E3779B97F4A7C15u + 1;
  for (float& value : made) {
    int sum = 0;
    for (int i = 0; i < 4; ++i) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      sum += static_cast<int>(state >> 52) - 2048;
    }
    value = static_cast<float>(sum) * (scale / 2048);
  }
  return made;
}

std::vector<uint16_t> upper_halves(const std::vector<float>& values) {
  std::vector<uint16_t> made(values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    uint32_t bits;
    std::memcpy(&bits, &values[i], 4);
    made[i] = static_cast<uint16_t>(bits >> 16);
  }
  return made;
}

const char* name_of(Compute compute) { return compute == Compute::kBf16 ? "bf16" : "fp32"; }
size_t size_of(Compute compute) { return compute == Compute::kBf16 ? 2 : 4; }
int per_cell(Compute compute) { return compute == Compute::kBf16 ? 2 : 1; }

struct Weight {
  PackedView view;
  std::vector<uint32_t> cells;

  Weight(const std::vector<float>& from, long n, long k, const std::vector<long>& ends, Compute compute)
      : view(packed_layout(n, k, ends.data(), static_cast<int>(ends.size()), per_cell(compute))),
        cells(static_cast<size_t>(view.panels() * view.steps() * 16)) {
    pack_rows(from.data(), Source::kFp32, view, 0, view.n, cells.data());
    view.cells = cells.data();
  }
};

}  // namespace
