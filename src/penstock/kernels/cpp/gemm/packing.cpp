#include "gemm/packing.hpp"

#include <cstring>
#include <stdexcept>

#if defined(PENSTOCK_X86)
#include <immintrin.h>
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // the compiler's own headers, in release 12
#endif

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
uint32_t element_bits(const uint8_t* row, size_t index) {
  if constexpr (kSource == Source::kFp32) {
    uint32_t bits;
    std::memcpy(&bits, row + index * 4, 4);
    return bits;
  }
  uint16_t half;
  std::memcpy(&half, row + index * 2, 2);
  return kSource == Source::kBf16 ? static_cast<uint32_t>(half) << 16 : half_to_float_bits(half);
}

// The cell that begins at element `index`; `pair`: its later half is there too.
template <Source kSource, int kPerCell>
uint32_t cell_of(const uint8_t* row, size_t index, bool pair) {
  if constexpr (kSource == Source::kBf16 && kPerCell == 2) {
    uint32_t cell = 0;
    std::memcpy(&cell, row + index * 2, pair ? 4 : 2);
    return cell;
  }
  const uint32_t early = element_bits<kSource>(row, index);
  if constexpr (kPerCell == 1) return early;
  const uint32_t late = pair ? to_bf16(element_bits<kSource>(row, index + 1)) : 0;
  return to_bf16(early) | late << 16;
}

// Sixteen rows of cells, `row_bytes` apart, to out[step][16].
using Transpose = void (*)(const uint8_t* in, size_t row_bytes, long steps, uint32_t* out);

void transpose_anywhere(const uint8_t* in, size_t row_bytes, long steps, uint32_t* out) {
  constexpr long kBlock = 64;  // so that the cells being written stay in the first-level cache
  for (long from = 0; from < steps; from += kBlock)
    for (size_t lane = 0; lane < 16; ++lane)
      for (long step = from; step < from + kBlock && step < steps; ++step)
        std::memcpy(out + step * 16 + static_cast<long>(lane), in + lane * row_bytes + step * 4, 4);
}

#if defined(PENSTOCK_X86)
__attribute__((target("avx512f"))) void transpose_avx512(const uint8_t* in, size_t row_bytes, long steps, uint32_t* out) {
  long step = 0;
  for (; step + 16 <= steps; step += 16, in += 64, out += 256) {
    __m512i a[16], b[16];
    for (size_t lane = 0; lane < 16; ++lane) a[lane] = _mm512_loadu_si512(in + lane * row_bytes);
    for (int i = 0; i < 16; i += 2) {
      b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
      b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {  // a[4 q + c]: columns c, 4 + c, 8 + c, 12 + c of rows 4 q to 4 q + 3
      a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
      a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
      a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
      a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    for (int c = 0; c < 4; ++c) {
      const __m512i low = _mm512_shuffle_i32x4(a[c], a[4 + c], 0x44), low2 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0x44);
      const __m512i high = _mm512_shuffle_i32x4(a[c], a[4 + c], 0xEE);
      const __m512i high2 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0xEE);
      _mm512_storeu_si512(out + c * 16, _mm512_shuffle_i32x4(low, low2, 0x88));
      _mm512_storeu_si512(out + (4 + c) * 16, _mm512_shuffle_i32x4(low, low2, 0xDD));
      _mm512_storeu_si512(out + (8 + c) * 16, _mm512_shuffle_i32x4(high, high2, 0x88));
      _mm512_storeu_si512(out + (12 + c) * 16, _mm512_shuffle_i32x4(high, high2, 0xDD));
    }
  }
  transpose_anywhere(in, row_bytes, steps - step, out);
}

// Four rows by four columns at a time: SSE2, which every x86-64 has.
void transpose_sse2(const uint8_t* in, size_t row_bytes, long steps, uint32_t* out) {
  long step = 0;
  for (; step + 4 <= steps; step += 4, in += 16, out += 64)
    for (size_t lane = 0; lane < 16; lane += 4) {
      __m128i a[4];
      for (size_t i = 0; i < 4; ++i) a[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + (lane + i) * row_bytes));
      const __m128i b0 = _mm_unpacklo_epi32(a[0], a[1]), b1 = _mm_unpackhi_epi32(a[0], a[1]);
      const __m128i b2 = _mm_unpacklo_epi32(a[2], a[3]), b3 = _mm_unpackhi_epi32(a[2], a[3]);
      const __m128i columns[4] = {_mm_unpacklo_epi64(b0, b2), _mm_unpackhi_epi64(b0, b2), _mm_unpacklo_epi64(b1, b3),
                                  _mm_unpackhi_epi64(b1, b3)};
      for (int i = 0; i < 4; ++i) _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i * 16 + lane), columns[i]);
    }
  transpose_anywhere(in, row_bytes, steps - step, out);
}
#endif

Transpose best_transpose() {
#if defined(PENSTOCK_X86)
  return __builtin_cpu_supports("avx512f") ? transpose_avx512 : transpose_sse2;
#else
  return transpose_anywhere;
#endif
}

// Is a cell of the result just the bytes of the source?
template <Source kSource, int kPerCell>
constexpr bool kCopies = (kSource == Source::kBf16 && kPerCell == 2) || (kSource == Source::kFp32 && kPerCell == 1);

// Rows of a panel that are all there; `rows` is the first of them.
template <Source kSource, int kPerCell>
void pack_panel(const uint8_t* rows, const PackedView& w, uint32_t* cells) {
  static const Transpose transpose = best_transpose();
  constexpr size_t kElement = kSource == Source::kFp32 ? 4 : 2;
  constexpr long kBlock = 64;
  const size_t row_bytes = static_cast<size_t>(w.k) * kElement;
  for (int s = 0; s < w.segments; ++s) {
    const long begin = w.step_begin[s], steps = w.step_begin[s + 1] - begin;
    const long whole = (w.k_begin[s + 1] - w.k_begin[s]) / kPerCell;  // the last step may lack its later half
    if constexpr (kCopies<kSource, kPerCell>)
      transpose(rows + static_cast<size_t>(w.k_begin[s]) * kElement, row_bytes, whole, cells + begin * 16);
    for (long from = kCopies<kSource, kPerCell> ? whole : 0; from < steps; from += kBlock) {
      const long count = from + kBlock < steps ? kBlock : steps - from;
      uint32_t strip[16][kBlock];
      for (size_t lane = 0; lane < 16; ++lane)
        for (long i = 0; i < count; ++i) {
          const long k = w.k_begin[s] + (from + i) * kPerCell;
          strip[lane][i] = cell_of<kSource, kPerCell>(rows + lane * row_bytes, static_cast<size_t>(k), from + i < whole);
        }
      transpose(reinterpret_cast<const uint8_t*>(strip), sizeof strip[0], count, cells + (begin + from) * 16);
    }
  }
}

// One row into its lane.
template <Source kSource, int kPerCell>
void pack_lane(const uint8_t* row, const PackedView& w, uint32_t* cells) {
  for (int s = 0; s < w.segments; ++s)
    for (long step = w.step_begin[s]; step < w.step_begin[s + 1]; ++step) {
      const long k = w.k_begin[s] + (step - w.step_begin[s]) * kPerCell;
      cells[step * 16] = cell_of<kSource, kPerCell>(row, static_cast<size_t>(k), k + 1 < w.k_begin[s + 1]);
    }
}

template <Source kSource, int kPerCell>
void pack_from(const uint8_t* rows, const PackedView& w, long first, long count, uint32_t* cells) {
  const size_t row_bytes = static_cast<size_t>(w.k) * (kSource == Source::kFp32 ? 4 : 2);
  for (long n = first; n < first + count;) {
    const uint8_t* from = rows + static_cast<size_t>(n - first) * row_bytes;
    uint32_t* panel = cells + n / 16 * w.steps() * 16;
    if (n % 16 == 0 && n + 16 <= first + count) {
      pack_panel<kSource, kPerCell>(from, w, panel);
      n += 16;
    } else {
      pack_lane<kSource, kPerCell>(from, w, panel + n % 16);
      ++n;
    }
  }
  if (first + count < w.n) return;
  for (long lane = (w.n - 1) % 16 + 1; lane < 16; ++lane)
    for (long step = 0; step < w.steps(); ++step) cells[((w.panels() - 1) * w.steps() + step) * 16 + lane] = 0;
}

template <Source kSource>
void pack_source(const uint8_t* rows, const PackedView& w, long first, long count, uint32_t* cells) {
  w.per_cell == 2 ? pack_from<kSource, 2>(rows, w, first, count, cells)
                  : pack_from<kSource, 1>(rows, w, first, count, cells);
}

// Sixteen outputs of one or two inputs, as many as are there, to a line of cells.
template <Source kSource, int kPerCell>
void pack_line(const uint8_t* early, const uint8_t* late, size_t first, size_t count, uint32_t* cells) {
  for (size_t lane = 0; lane < count; ++lane) {
    const uint32_t bits = element_bits<kSource>(early, first + lane);
    if constexpr (kPerCell == 1) {
      cells[lane] = bits;
      continue;
    }
    const uint32_t more = late == nullptr ? 0 : element_bits<kSource>(late, first + lane);
    cells[lane] = kSource == Source::kBf16 ? bits >> 16 | more : to_bf16(bits) | static_cast<uint32_t>(to_bf16(more)) << 16;
  }
  for (size_t lane = count; lane < 16; ++lane) cells[lane] = 0;
}

// Some panels at a time, so that a row is read by the line and every line of cells is written once.
template <Source kSource, int kPerCell>
void pack_turned(const uint8_t* columns, const PackedView& w, uint32_t* cells) {
  constexpr long kPanels = 16;
  const size_t row_bytes = static_cast<size_t>(w.n) * (kSource == Source::kFp32 ? 4 : 2);
  for (long begin = 0; begin < w.panels(); begin += kPanels)
    for (int s = 0; s < w.segments; ++s)
      for (long step = w.step_begin[s]; step < w.step_begin[s + 1]; ++step) {
        const long k = w.k_begin[s] + (step - w.step_begin[s]) * kPerCell;
        const uint8_t* early = columns + static_cast<size_t>(k) * row_bytes;
        const uint8_t* late = kPerCell == 2 && k + 1 < w.k_begin[s + 1] ? early + row_bytes : nullptr;
        for (long panel = begin; panel < begin + kPanels && panel < w.panels(); ++panel) {
          const long left = w.n - panel * 16;
          pack_line<kSource, kPerCell>(early, late, static_cast<size_t>(panel) * 16, static_cast<size_t>(left < 16 ? left : 16),
                                       cells + (panel * w.steps() + step) * 16);
        }
      }
}

template <Source kSource>
void pack_turned_source(const uint8_t* columns, const PackedView& w, uint32_t* cells) {
  w.per_cell == 2 ? pack_turned<kSource, 2>(columns, w, cells) : pack_turned<kSource, 1>(columns, w, cells);
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

void pack_rows(const void* rows, Source source, const PackedView& layout, long first, long count, uint32_t* cells) {
  const uint8_t* from = static_cast<const uint8_t*>(rows);
  switch (source) {
    case Source::kBf16: return pack_source<Source::kBf16>(from, layout, first, count, cells);
    case Source::kFp16: return pack_source<Source::kFp16>(from, layout, first, count, cells);
    case Source::kFp32: return pack_source<Source::kFp32>(from, layout, first, count, cells);
  }
}

void pack_columns(const void* columns, Source source, const PackedView& layout, uint32_t* cells) {
  const uint8_t* from = static_cast<const uint8_t*>(columns);
  switch (source) {
    case Source::kBf16: return pack_turned_source<Source::kBf16>(from, layout, cells);
    case Source::kFp16: return pack_turned_source<Source::kFp16>(from, layout, cells);
    case Source::kFp32: return pack_turned_source<Source::kFp32>(from, layout, cells);
  }
}

}  // namespace penstock
