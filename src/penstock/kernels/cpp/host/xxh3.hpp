// XXH3, of 128 bits and seed 0 but for small records, against damage, not malice:
// https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace penstock {

using Checksum = std::array<uint8_t, 16>;  // big-endian, as every other implementation prints it

Checksum xxh3_128(const void* data, size_t bytes);

// XXH3, 64 bits, of 97 to 128 bytes: small records, with a seed.
constexpr size_t kLeastRecord = 97, kMostRecord = 128;
uint64_t xxh3_64(const uint8_t* data, size_t bytes, uint64_t seed);

constexpr size_t kMaxSuffix = 1024;

// Of a page and the 1 to kMaxSuffix bytes of `suffix` behind it.  Where `into` is not null the page is copied there in
// the same pass, and what is hashed is what was stored, even while another thread writes to `page`.
Checksum xxh3_128_sealed(const uint8_t* page, uint8_t* into, size_t bytes, const uint8_t* suffix, size_t suffix_bytes);

// The same of a page that grows where it stands: each part is read while it is still in the cache.
class GrowingPage {
 public:
  GrowingPage(const uint8_t* page, size_t bytes);
  ~GrowingPage();
  GrowingPage(GrowingPage&&) noexcept;

  // The first `there` bytes do not change any more.  Never less than before.
  void grew(size_t there);

  // All of it is there.  Once.
  Checksum sealed(const uint8_t* suffix, size_t suffix_bytes);

 private:
  struct Read;
  const uint8_t* page_;
  size_t bytes_;
  std::unique_ptr<Read> read_;
};

}  // namespace penstock
