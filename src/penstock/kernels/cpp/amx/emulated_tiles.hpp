// The tile instructions of Intel AMX in C++, for tests on processors without them (CMake: PENSTOCK_EMULATE_AMX).
//
// After the pseudo-code of LDTILECFG, TILELOADD, TILESTORED, TILEZERO, TILERELEASE and TDPBF16PS in the Intel SDM,
// volume 2.  What would be an exception there ends the process here.  Never compared with a processor that has them.
#pragma once

#include <immintrin.h>

#include "amx/amx_tiles.hpp"

namespace {

struct TileState {
  bool configured;
  TileShapes shapes;
  alignas(64) uint8_t data[kTileRegisters][kTileRows][kTileBytes];
};
thread_local TileState tile_state;

PS_INLINE void tile_require(bool holds) {
  if (!holds) __builtin_trap();
}

PS_INLINE TileState& tiles_with(int tile) {
  tile_require(tile_state.configured && tile_state.shapes.rows[tile] != 0);
  return tile_state;
}

__attribute__((noinline)) void tile_configure(const TileShapes& shapes) {
  tile_require(shapes.palette == 1 && shapes.start_row == 0);
  for (const uint8_t byte : shapes.reserved) tile_require(byte == 0);
  for (int tile = 0; tile < 16; ++tile) {
    tile_require(shapes.rows[tile] <= kTileRows && shapes.row_bytes[tile] <= kTileBytes);
    tile_require((shapes.rows[tile] == 0) == (shapes.row_bytes[tile] == 0));
    if (tile >= kTileRegisters) tile_require(shapes.rows[tile] == 0);
  }
  tile_state.configured = true;
  tile_state.shapes = shapes;
  __builtin_memset(tile_state.data, 0, sizeof tile_state.data);
}

PS_INLINE void tile_release() { tile_state.configured = false; }

template <int kTile>
void tile_zero() {
  __builtin_memset(tiles_with(kTile).data[kTile], 0, sizeof tile_state.data[kTile]);
}

template <int kTile>
void tile_load(const void* from, size_t stride) {
  TileState& tiles = tiles_with(kTile);
  tile_zero<kTile>();
  for (size_t row = 0; row < tiles.shapes.rows[kTile]; ++row)
    __builtin_memcpy(tiles.data[kTile][row], static_cast<const char*>(from) + row * stride, tiles.shapes.row_bytes[kTile]);
}

template <int kTile>
void tile_store(void* to, size_t stride) {
  const TileState& tiles = tiles_with(kTile);
  for (size_t row = 0; row < tiles.shapes.rows[kTile]; ++row)
    __builtin_memcpy(static_cast<char*>(to) + row * stride, tiles.data[kTile][row], tiles.shapes.row_bytes[kTile]);
}

// One row of TDPBF16PS: two chains of fused multiply-adds from zero, for the earlier and the later values of the pairs;
// then their sum, then its sum with what was there.
__attribute__((noinline, noipa)) void tile_multiply_row(float* sum, const uint32_t* a, const uint32_t (*b)[16], int pairs,
                                                        int outputs) {
  float early[16] = {}, late[16] = {};
  for (int k = 0; k < pairs; ++k)
    for (int n = 0; n < outputs; ++n) {
      early[n] = __builtin_fmaf(bf16_to_float(a[k] & 0xFFFF), bf16_to_float(b[k][n] & 0xFFFF), early[n]);
      late[n] = __builtin_fmaf(bf16_to_float(a[k] >> 16), bf16_to_float(b[k][n] >> 16), late[n]);
    }
  for (int n = 0; n < outputs; ++n) sum[n] = sum[n] + (early[n] + late[n]);
}

// Denormal values are zero, given or found; sums round to nearest even; no exception is raised.
constexpr unsigned kTileRounding = 0x1F80 | 0x8000 | 0x0040;

template <int kSum, int kA, int kB>
void tile_multiply() {
  TileState& tiles = tiles_with(kSum);
  const TileShapes& shapes = tiles_with(kA).shapes;
  tile_require(tiles_with(kB).configured && kSum != kA && kSum != kB && kA != kB);
  tile_require(shapes.rows[kSum] == shapes.rows[kA] && shapes.row_bytes[kSum] == shapes.row_bytes[kB]);
  tile_require(shapes.row_bytes[kA] == 4 * shapes.rows[kB]);
  const auto* a = reinterpret_cast<const uint32_t(*)[16]>(tiles.data[kA]);
  const auto* b = reinterpret_cast<const uint32_t(*)[16]>(tiles.data[kB]);
  auto* sum = reinterpret_cast<float(*)[16]>(tiles.data[kSum]);
  const unsigned mode = _mm_getcsr();
  _mm_setcsr(kTileRounding);
  for (int m = 0; m < shapes.rows[kSum]; ++m)
    tile_multiply_row(sum[m], a[m], b, shapes.row_bytes[kA] / 4, shapes.row_bytes[kB] / 4);
  _mm_setcsr(mode);
}

}  // namespace
