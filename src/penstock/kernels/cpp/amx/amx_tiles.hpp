// The tile registers of Intel AMX as functions: the instructions themselves, or amx/emulated_tiles.hpp in their place.
//
// Assembly instead of the compiler's intrinsics: those of GCC 12 do not tell that a tile load reads memory, nor that a
// configuration is 64 bytes long, so what was written just before could come too late.  Tiles are numbered at compile
// time and belong to the thread; the compiler itself never uses them.
#pragma once

#include "families/simd.hpp"

namespace {

constexpr int kTileRegisters = 8;
constexpr int kTileRows = 16;  // at most
constexpr int kTileBytes = 64;  // of a row, at most

// What LDTILECFG reads (Intel SDM, volume 1, "Programming with Intel AMX"): palette 1 has eight tiles of 16 x 64 bytes.
// A tile without rows and bytes cannot be used.
struct alignas(64) TileShapes {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  PS_INLINE void set(int tile, int rows_of_it) {
    rows[tile] = static_cast<uint8_t>(rows_of_it);
    row_bytes[tile] = rows_of_it == 0 ? 0 : kTileBytes;
  }
};
static_assert(sizeof(TileShapes) == 64);

}  // namespace

#if defined(PENSTOCK_EMULATE_AMX)
#include "amx/emulated_tiles.hpp"
#else
namespace {

// All tiles are zero afterwards.
PS_INLINE void tile_configure(const TileShapes& shapes) { asm volatile("ldtilecfg %0" : : "m"(shapes)); }

// No tile is in use afterwards, so that the system has none to save.
PS_INLINE void tile_release() { asm volatile("tilerelease"); }

template <int kTile>
PS_INLINE void tile_zero() {
  asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
}

// Rows lie `stride` bytes apart.
template <int kTile>
PS_INLINE void tile_load(const void* from, size_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(kTile) : "memory");
}

template <int kTile>
PS_INLINE void tile_store(void* to, size_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(kTile) : "memory");
}

// sum [m][n] fp32 += a [m][k] . b [k][n] over pairs of bf16.
template <int kSum, int kA, int kB>
PS_INLINE void tile_multiply() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSum), "i"(kA), "i"(kB));
}

}  // namespace
#endif
