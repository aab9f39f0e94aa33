// XXH3, 128 bits, seed 0 (https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md): against damage, not malice.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace penstock {

using Checksum = std::array<uint8_t, 16>;  // big-endian, as every other implementation prints it

Checksum xxh3_128(const void* data, size_t bytes);

}  // namespace penstock
