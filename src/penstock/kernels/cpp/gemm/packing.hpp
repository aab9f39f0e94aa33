// Weights to the layout that the kernels read; rows by rows, from any thread.
#pragma once

#include "families/family.hpp"

namespace penstock {

enum class Source : int { kBf16 = 0, kFp16 = 1, kFp32 = 2 };

// The layout of [n, k] cut at `ends` (the last is k), without cells.  Throws std::invalid_argument.
PackedView packed_layout(long n, long k, const long* ends, int segments, int per_cell);

// Writes rows [first, first + count) of the weight, which begin at `rows` (any byte); with the last row goes what fills
// its panel.  `cells` are all layout.panels() * layout.steps() * 16 of the weight; bf16 cells round to nearest even what
// is not bf16 already.  Threads may pack rows of different panels at once.
void pack_rows(const void* rows, Source source, const PackedView& layout, long first, long count, uint32_t* cells);

// The same for a whole weight that is stored the other way round: [k, n].
void pack_columns(const void* columns, Source source, const PackedView& layout, uint32_t* cells);

}  // namespace penstock
