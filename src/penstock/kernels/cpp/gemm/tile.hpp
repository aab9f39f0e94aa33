// The one inner product: a tile of rows times panels of sixteen outputs.  Serves GEMV, GEMM, q.k and p.v alike.
//
// A panel is a matrix of cells [steps][16 lanes]; a cell is 32 bits: one fp32 value, or two bf16 values that follow each
// other in the direction of the sum.  Each lane of each row is one chain from the first step to the last, so its bits
// depend on neither the number of rows nor that of panels.
#pragma once

#include <type_traits>

#include "families/simd.hpp"

namespace {

// Without instructions for bf16 each tile would make floats of the same inputs: they are written as floats once instead.
constexpr bool kWidensInputs = kWidth == 8;

// One fp32 value a step.
struct Fp32 {
  using Value = float;
  using Wide = Fp32;  // how inputs lie that are written anew for a product
  static constexpr int kPerCell = 1;
  static constexpr size_t kInputBytes = 4;  // of one row in one step

  static PS_INLINE F16 rounded(const F16& value) { return value; }
  static PS_INLINE void store_rounded(Value* to, const F16& value, int count) { store_part(to, value, count); }
};

struct WidenedBf16;

// Two bf16 values a step: the lower half of a cell is the earlier one.
struct Bf16 {
  using Value = uint16_t;
  using Wide = std::conditional_t<kWidensInputs, WidenedBf16, Bf16>;
  static constexpr int kPerCell = 2;
  static constexpr size_t kInputBytes = 4;

  static PS_INLINE F16 rounded(const F16& value) { return round_bf16(value); }
  static PS_INLINE void store_rounded(Value* to, const F16& value, int count) { store_upper_halves(to, value, count); }
};

// The same with inputs that lie as floats.
struct WidenedBf16 {
  using Value = float;
  static constexpr int kPerCell = 2;
  static constexpr size_t kInputBytes = 8;

  static PS_INLINE F16 rounded(const F16& value) { return round_bf16(value); }
  static PS_INLINE void store_rounded(Value* to, const F16& value, int count) { store_part(to, value, count); }
};

// To the compute type.
template <class D>
PS_INLINE void store_values(typename D::Value* to, const F16& value, int count) {
  D::store_rounded(to, D::rounded(value), count);
}

PS_INLINE F16 low_half(const U16& cells) { return bits_as<F16>(cells << 16); }
PS_INLINE F16 high_half(const U16& cells) { return bits_as<F16>(cells & splat_word(0xFFFF0000u)); }

PS_INLINE uint32_t load_cell(const void* from) {
  uint32_t cell;
  __builtin_memcpy(&cell, from, 4);
  return cell;
}

// acc += cells . x, both values of a cell (the order and rounding inside a cell are those of the family).
template <class D>
PS_INLINE F16 dot_cells(const F16& acc, const U16& cells, uint32_t x) {
  if constexpr (D::kPerCell == 1) {
    return fma16(bits_as<F16>(cells), bits_as<F16>(splat_word(x)), acc);
  } else {
#if defined(__AVX512BF16__)
    F16 to;
    to.part[0] = (FloatReg)_mm512_dpbf16_ps((__m512)acc.part[0], (__m512bh)cells.part[0],
                                            (__m512bh)_mm512_set1_epi32(static_cast<int>(x)));
    return to;
#else
    const F16 early = fma16(low_half(cells), bits_as<F16>(splat_word(x << 16)), acc);
    return fma16(high_half(cells), bits_as<F16>(splat_word(x & 0xFFFF0000u)), early);
#endif
  }
}

// acc += cells . x, whose values of one row and step lie at `x`.
template <class D>
PS_INLINE F16 dot_inputs(const F16& acc, const U16& cells, const void* x) {
  if constexpr (std::is_same_v<D, WidenedBf16>) {
    const char* values = static_cast<const char*>(x);
    const F16 early = fma16(low_half(cells), bits_as<F16>(splat_word(load_cell(values))), acc);
    return fma16(high_half(cells), bits_as<F16>(splat_word(load_cell(values + 4))), early);
  } else {
    return dot_cells<D>(acc, cells, load_cell(x));
  }
}

// `count` inputs as D::Wide has them.
template <class D>
PS_INLINE void write_inputs(const void* from, long count, typename D::Wide::Value* to) {
  if constexpr (D::kInputBytes == D::Wide::kInputBytes) {
    __builtin_memcpy(to, from, static_cast<size_t>(count) * sizeof(*to));
  } else {
    for (long i = 0; i < count; ++i) to[i] = bf16_to_float(static_cast<const uint16_t*>(from)[i]);
  }
}

// Rows and panels of a tile that fit the registers of the family.  A tall tile is for exactly its number of rows: its panels
// come from memory while it multiplies, where two tiles would wait for them one after the other.
// Packed inputs may be those of more rows: their addresses need one register.
#if defined(__AVX512F__)
constexpr int kMaxRows = 8;
constexpr int kPackedRows = kMaxRows;
constexpr int kTallRows = 12;
constexpr int panels_at_once(int rows) { return rows <= 4 ? 6 : rows <= 8 ? 3 : 2; }
#elif defined(__AVX2__)
constexpr int kMaxRows = 4;
constexpr int kPackedRows = 6;
constexpr int kTallRows = kMaxRows;
constexpr int panels_at_once(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }
#else
constexpr int kMaxRows = 2;
constexpr int kPackedRows = kMaxRows;
constexpr int kTallRows = kMaxRows;
constexpr int panels_at_once(int rows) { return rows == 1 ? 2 : 1; }
#endif

// Of `left` panels, of which `wide` would be taken at once.
PS_INLINE int panels_left(long left, int wide) {
  if (left >= wide) return wide;
  return kTallRows > kMaxRows && left >= 2 ? 2 : 1;
}

#if defined(__AVX512F__)
constexpr int kAttentionRows = 6;
constexpr int attention_panels(int) { return 4; }
#else
constexpr int kAttentionRows = kPackedRows;
constexpr int attention_panels(int rows) { return panels_at_once(rows); }
#endif

#if defined(__AVX512BF16__) || !defined(__AVX2__)
constexpr bool kWholeCells = true;
#else
constexpr bool kWholeCells = false;  // halves of a bf16 cell one after the other: only one half occupies registers
#endif

constexpr int kStreamSteps = 32;  // steps between asking for a cell and using it
constexpr int kMaxPanels = 6;
constexpr int kMaxBases = 4;

// Where a tile's operands are.  Step s of panel p lies at base[b] + offset[p] + s * step_stride (cells) for each base
// in turn, `steps` of them a base.  Rows of x are `x_stride` bytes apart, its steps `x_step` bytes; rows of the
// accumulator are `acc_stride` floats apart, its panels 16 floats.  Of the tile's result and the sums to its left, which
// lie before it and `left_stride` floats apart, the sum is made from right to left; it takes the place of the last one.
struct TileArgs {
  const uint32_t* base[kMaxBases];
  int bases;
  ptrdiff_t offset[kMaxPanels];
  size_t step_stride;
  long steps;
  const char* x;
  size_t x_stride;
  size_t x_step;
  float* acc;
  size_t acc_stride;
  int lefts = 0;
  long left_stride = 0;
  const char* ahead[2];  // memory that will be wanted soon, a line each step, `ahead_step` bytes further each time
  size_t ahead_step[2];
  const uint32_t* next_base[kMaxBases];  // panels that will be wanted next, laid out like these
  ptrdiff_t next_offset[kMaxPanels];
};

// How a tile asks for memory before it needs it.
enum class Fetch {
  kNothing,  // everything is in a cache already
  kStream,   // its own panels, which come from memory
  kAhead,    // what `ahead` names, while its own panels are in a cache; x and panels lie step by step, without gaps,
             // as they do in a tall tile
  kNext,     // what `next_base` names
};

#define PS_ROWS _Pragma("GCC unroll 16") for (int m = 0; m < M; ++m)
#define PS_PANELS _Pragma("GCC unroll 8") for (int p = 0; p < P; ++p)

// acc += one step of panels . x
template <class D, int M, int P>
PS_INLINE void multiply_step(F16 (&acc)[M][P], const uint32_t* cells, const ptrdiff_t (&offset)[P], const char* x,
                             size_t x_stride) {
  if constexpr (kWholeCells || D::kPerCell == 1) {
    U16 w[P];
    PS_PANELS w[p] = load_as<U16>(cells + offset[p]);
    PS_ROWS {
      const uint32_t value = load_cell(x + m * x_stride);
      PS_PANELS acc[m][p] = dot_cells<D>(acc[m][p], w[p], value);
    }
  } else if constexpr (std::is_same_v<D, WidenedBf16>) {
    F16 w[P];
    PS_PANELS w[p] = low_half(load_as<U16>(cells + offset[p]));
    PS_ROWS {
      const F16 value = bits_as<F16>(splat_word(load_cell(x + m * x_stride)));
      PS_PANELS acc[m][p] = fma16(w[p], value, acc[m][p]);
    }
    PS_PANELS w[p] = high_half(load_as<U16>(cells + offset[p]));
    PS_ROWS {
      const F16 value = bits_as<F16>(splat_word(load_cell(x + m * x_stride + 4)));
      PS_PANELS acc[m][p] = fma16(w[p], value, acc[m][p]);
    }
  } else {
    F16 w[P];
    PS_PANELS w[p] = low_half(load_as<U16>(cells + offset[p]));
    PS_ROWS {
      const F16 value = low_half(splat_word(load_cell(x + m * x_stride)));
      PS_PANELS acc[m][p] = fma16(w[p], value, acc[m][p]);
    }
    PS_PANELS w[p] = high_half(load_as<U16>(cells + offset[p]));
    PS_ROWS {
      const F16 value = high_half(splat_word(load_cell(x + m * x_stride)));
      PS_PANELS acc[m][p] = fma16(w[p], value, acc[m][p]);
    }
  }
}

// Sums of M rows and P panels, to which those on their left are added, to memory.
template <int M, int P>
PS_INLINE void store_sums(F16 (&acc)[M][P], float* to, size_t stride, int lefts, long left_stride) {
  for (; lefts > 0; --lefts) {
    to -= left_stride;
    PS_ROWS PS_PANELS acc[m][p] = load(to + m * stride + p * 16) + acc[m][p];
  }
  PS_ROWS PS_PANELS store(to + m * stride + p * 16, acc[m][p]);
}

// acc (or zero, when not `resume`) += panels . x
template <class D, int M, int P, Fetch kFetch>
__attribute__((noinline)) void tile(const TileArgs& args, bool resume) {
  F16 acc[M][P];
  if (resume) {
    PS_ROWS PS_PANELS acc[m][p] = load(args.acc + m * args.acc_stride + p * 16);
  } else {
    PS_ROWS PS_PANELS acc[m][p] = splat(0.0f);
  }
  ptrdiff_t offset[P];
  PS_PANELS offset[p] = args.offset[p];
  const char* x = args.x;
  constexpr bool kDense = kFetch == Fetch::kAhead || (kFetch == Fetch::kStream && M > kMaxRows);
  const size_t x_stride = kDense ? D::kInputBytes : args.x_stride, x_step = kDense ? M * D::kInputBytes : args.x_step;
  const size_t step_stride = kDense ? 16 : args.step_stride;
  const char *ahead = args.ahead[0], *also_ahead = args.ahead[1];
  for (int b = 0; b < args.bases; ++b) {
    const uint32_t *cells = args.base[b], *next = args.next_base[b];
    for (long step = 0; step < args.steps; ++step) {
      multiply_step<D, M, P>(acc, cells, offset, x, x_stride);
      if constexpr (kFetch == Fetch::kStream) PS_PANELS __builtin_prefetch(cells + offset[p] + kStreamSteps * 16, 0, 3);
      if constexpr (kFetch == Fetch::kNext) {
        PS_PANELS __builtin_prefetch(next + args.next_offset[p], 0, 3);
        next += step_stride;
      }
      if constexpr (kFetch == Fetch::kAhead) {
        __builtin_prefetch(ahead, 0, 2);
        __builtin_prefetch(also_ahead, 0, 2);
        ahead += args.ahead_step[0];
        also_ahead += args.ahead_step[1];
      }
      cells += step_stride;
      x += x_step;
    }
  }
  store_sums<M, P>(acc, args.acc, args.acc_stride, args.lefts, args.left_stride);
}

using TileFn = void (*)(const TileArgs&, bool);

template <class D, int P, int M, Fetch kFetch>
TileFn pick_rows(int rows) {
  if (rows == M) return tile<D, M, P, kFetch>;
  if constexpr (M > 1) return pick_rows<D, P, M - 1, kFetch>(rows);
  return nullptr;
}

// The tile of `rows` by `panels`, which must be 1, `panels_at_once` of these or more rows, or what `panels_left` says.
template <class D, Fetch kFetch>
TileFn pick_tile(int rows, int panels) {
#if defined(__AVX512F__)
  switch (panels) {
    case 6: return pick_rows<D, 6, 4, kFetch>(rows);
    case 3: return pick_rows<D, 3, 8, kFetch>(rows);
    case 2: return pick_rows<D, 2, kTallRows, kFetch>(rows);
    default: return pick_rows<D, 1, kTallRows, kFetch>(rows);
  }
#elif defined(__AVX2__)
  switch (panels) {
    case 4: return pick_rows<D, 4, 1, kFetch>(rows);
    case 2: return pick_rows<D, 2, 3, kFetch>(rows);
    default: return pick_rows<D, 1, std::is_same_v<D, Bf16> ? kMaxRows : kPackedRows, kFetch>(rows);
  }
#else
  return panels == 2 ? pick_rows<D, 2, 1, kFetch>(rows) : pick_rows<D, 1, 2, kFetch>(rows);
#endif
}

// The same for attention, where panels are 1 or `attention_panels` of these rows.
template <class D, Fetch kFetch>
TileFn pick_attention_tile(int rows, int panels) {
#if defined(__AVX512F__)
  return panels == 4 ? pick_rows<D, 4, 6, kFetch>(rows) : pick_rows<D, 1, 6, kFetch>(rows);
#else
  return pick_tile<D, kFetch>(rows, panels);
#endif
}

}  // namespace
