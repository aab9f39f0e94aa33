// Weights to the layout that the kernels read: once, on one thread (the zygote has no other).
#pragma once

#include "family.hpp"

namespace penstock {

enum class Source : int { kBf16 = 0, kFp16 = 1, kFp32 = 2 };

// The layout of [n, k] cut at `ends` (the last is k), without cells.  Throws std::invalid_argument.
PackedView packed_layout(long n, long k, const long* ends, int segments, int per_cell);

// Writes layout.panels() * layout.steps() * 16 cells.  bf16 cells round to nearest even what is not bf16 already.
void pack(const void* weight, Source source, const PackedView& layout, uint32_t* cells);

}  // namespace penstock
