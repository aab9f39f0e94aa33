// Chained hashes of blocks of 16 token ids: BLAKE3 in its keyed mode (https://github.com/BLAKE3-team/BLAKE3-specs), the
// parent's hash as the key, 64 bytes of tokens as the message.  Such a message is one block of one chunk, so a hash is
// one compression.  Little-endian machines only, like all of these kernels.
#pragma once

#include <cstdint>

namespace penstock {

constexpr int kHashBytes = 32;
constexpr int kBlockTokens = 16;

// Writes `blocks` hashes one after the other: the first one's key is `root`, every other's the hash before it.
void chain_hashes(const uint8_t* root, const uint32_t* tokens, long blocks, uint8_t* out);

}  // namespace penstock
