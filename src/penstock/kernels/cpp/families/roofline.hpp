// What the machine can do at most, for comparison: reading memory, and multiplying out of the first-level cache.
#pragma once

#include "gemm/gemm.hpp"

namespace {

// Reads `count` cells once with all threads; returns their exclusive or, so that nothing can be left out.
uint32_t read_cells(const uint32_t* cells, long count) {
  constexpr long kPiece = 1 << 18;
  uint32_t result = 0;
  each_item((count + kPiece - 1) / kPiece, static_cast<double>(count), [&](long item, int) {
    U16 sum[4] = {splat_word(0), splat_word(0), splat_word(0), splat_word(0)};
    const uint32_t* end = cells + min_of(count, (item + 1) * kPiece) / 64 * 64;
    for (const uint32_t* at = cells + item * kPiece; at < end; at += 64)
      for (int i = 0; i < 4; ++i) sum[i] = sum[i] ^ load_as<U16>(at + i * 16);
    alignas(64) uint32_t lane[16];
    store(lane, (sum[0] ^ sum[1]) ^ (sum[2] ^ sum[3]));
    for (int i = 1; i < 16; ++i) lane[0] ^= lane[i];
    __atomic_fetch_xor(&result, lane[0], __ATOMIC_RELAXED);
  });
  return result;
}

// Runs the widest tile `repeats` times on every thread, out of the cache; returns floating-point operations done.
template <class D>
double multiply(long repeats) {
  using Wide = typename D::Wide;
  constexpr int kRows = kPackedRows, kPanels = panels_at_once(kPackedRows);
  constexpr long kSteps = 64;
  constexpr size_t kInputs = kRows * kSteps * Wide::kInputBytes;
  const long threads = thread_count();
  each_item(threads, 1e9, [&](long, int worker) {
    constexpr size_t kCells = kPanels * kSteps * 16;
    char* memory = static_cast<char*>(workspace(worker, kCells * 4 + kInputs + kRows * kPanels * 64));
    __builtin_memset(memory, 0, kCells * 4 + kInputs);
    TileArgs tile{};
    tile.base[0] = reinterpret_cast<const uint32_t*>(memory);
    tile.bases = 1;
    for (int p = 0; p < kPanels; ++p) tile.offset[p] = p * kSteps * 16;
    tile.step_stride = 16;
    tile.steps = kSteps;
    tile.x = memory + kCells * 4;
    tile.x_stride = Wide::kInputBytes;
    tile.x_step = kRows * Wide::kInputBytes;
    tile.acc = reinterpret_cast<float*>(memory + kCells * 4 + kInputs);
    tile.acc_stride = kPanels * 16;
    tile.ahead[0] = tile.ahead[1] = memory;  // what it fetches is there already
    for (long i = 0; i < repeats; ++i) pick_tile<Wide, Fetch::kAhead>(kRows, kPanels)(tile, i != 0);
  });
  return 2.0 * static_cast<double>(threads * repeats * kRows * kPanels * kSteps * 16) * D::kPerCell;
}

}  // namespace
