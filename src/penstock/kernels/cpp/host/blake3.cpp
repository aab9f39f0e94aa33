// One compression after the other, each waiting for the one before: what counts is latency.  So the words are kept in
// general registers, where an operation takes one cycle; in vector registers it takes two on some processors.
#include "host/blake3.hpp"

#include <cstring>

namespace penstock {
namespace {

constexpr uint32_t kIv[4] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a};
constexpr uint32_t kFlags = 1 | 2 | 8 | 16;  // first and last block of its chunk, root of its tree, keyed

// Which words of the message each round takes: the permutation of the specification, applied once more every time.
constexpr int kOrder[7][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8},
    {3, 4, 10, 12, 13, 2, 7, 14, 6, 5, 9, 0, 11, 15, 8, 1}, {10, 7, 12, 9, 14, 3, 13, 15, 4, 0, 11, 2, 5, 8, 1, 6},
    {12, 13, 9, 11, 15, 10, 14, 8, 7, 2, 5, 3, 0, 1, 6, 4}, {9, 14, 11, 5, 8, 12, 15, 1, 13, 3, 0, 10, 2, 6, 4, 7},
    {11, 15, 5, 0, 1, 9, 8, 6, 14, 10, 2, 12, 3, 4, 7, 13}};

inline uint32_t turned_right(uint32_t x, int bits) { return (x >> bits) | (x << (32 - bits)); }

// The specification's G.
inline void mix(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d, uint32_t mx, uint32_t my) {
  a = (a + mx) + b;
  d = turned_right(d ^ a, 16);
  c += d;
  b = turned_right(b ^ c, 12);
  a = (a + my) + b;
  d = turned_right(d ^ a, 8);
  c += d;
  b = turned_right(b ^ c, 7);
}

template <int kRound>
inline void one_round(uint32_t* v, const uint32_t* m) {
  constexpr const int* order = kOrder[kRound];
  mix(v[0], v[4], v[8], v[12], m[order[0]], m[order[1]]);
  mix(v[1], v[5], v[9], v[13], m[order[2]], m[order[3]]);
  mix(v[2], v[6], v[10], v[14], m[order[4]], m[order[5]]);
  mix(v[3], v[7], v[11], v[15], m[order[6]], m[order[7]]);
  mix(v[0], v[5], v[10], v[15], m[order[8]], m[order[9]]);
  mix(v[1], v[6], v[11], v[12], m[order[10]], m[order[11]]);
  mix(v[2], v[7], v[8], v[13], m[order[12]], m[order[13]]);
  mix(v[3], v[4], v[9], v[14], m[order[14]], m[order[15]]);
}

}  // namespace

void chain_hashes(const uint8_t* root, const uint32_t* tokens, long blocks, uint8_t* out) {
  uint32_t v[16];
  std::memcpy(v, root, kHashBytes);
  for (long block = 0; block < blocks; ++block, tokens += kBlockTokens, out += kHashBytes) {
    for (int i = 0; i < 4; ++i) v[8 + i] = kIv[i];
    v[12] = v[13] = 0;
    v[14] = 4 * kBlockTokens;
    v[15] = kFlags;
    one_round<0>(v, tokens);
    one_round<1>(v, tokens);
    one_round<2>(v, tokens);
    one_round<3>(v, tokens);
    one_round<4>(v, tokens);
    one_round<5>(v, tokens);
    one_round<6>(v, tokens);
    for (int i = 0; i < 8; ++i) v[i] ^= v[8 + i];
    std::memcpy(out, v, kHashBytes);
  }
}

}  // namespace penstock
