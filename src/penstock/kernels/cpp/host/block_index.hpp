// Which owners hold which blocks: the memory behind the router's prefix index.
//
// A block is known by the first 8 bytes of its hash (two of 10^8 blocks share them with a chance of 1 in 4,000; that
// costs a wrong guess).  Its owners are the number of a set (host/owner_sets.hpp).  So a block takes 12 bytes, 15 to 19 with
// the free room of its table, however many owners it has.  The table is cut into shards that grow by themselves, a
// quarter at a time: no insertion waits for more than its own shard.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "host/owner_sets.hpp"

namespace penstock {

class BlockIndex {
 public:
  // Both limits hold for good: what is over them is refused.
  BlockIndex(long max_blocks, int max_owners);

  // A number for a new owner; none when all are taken.  Given back with close(), after which sweep() finds what it
  // held, shard by shard until it has looked at this many places; the number is free again when all were looked at.
  std::optional<int> open();
  void close(int owner);
  void sweep(long places);

  // `owner` holds these blocks now.  Returns how many were refused.
  long add(int owner, const uint64_t* keys, long count);
  void remove(int owner, const uint64_t* keys, long count);
  bool has(int owner, uint64_t key) const;

  // Writes how many leading blocks of a prompt each owner holds.  `key_at(i)` is the key of its block i.
  //
  // Hashes are chained and caches give up the ends of chains first, so the owners of a block are among those of the
  // block before it.  The places where some drop out are found by galloping and bisection.
  template <class KeyAt>
  void match(const KeyAt& key_at, long blocks, int32_t* depths) const;

  int max_owners() const { return max_owners_; }
  long blocks() const { return blocks_; }
  uint64_t memory_bytes() const;

 private:
  struct Shard {
    std::vector<uint64_t> keys;  // 0: a free place
    std::vector<uint32_t> sets;
    long used = 0;

    long home(uint64_t key) const {  // the lower half of the key, scaled to the places there are
      return static_cast<long>((static_cast<uint64_t>(static_cast<uint32_t>(key)) * keys.size()) >> 32);
    }
    long after(long place) const { return place + 1 == static_cast<long>(keys.size()) ? 0 : place + 1; }
    long place_of(uint64_t key) const;  // where it is, or the free place where it would go
    void grow();
    void erase(long place);
  };

  static constexpr int kShardBits = 10;
  static uint64_t whole(uint64_t key) { return key == 0 ? 1 : key; }
  Shard& shard_of(uint64_t key) { return shards_[key >> (64 - kShardBits)]; }
  const Shard& shard_of(uint64_t key) const { return shards_[key >> (64 - kShardBits)]; }

  uint32_t find(uint64_t key) const;
  void assign(Shard& shard, long place, uint32_t set);
  void check(int owner) const;
  void clean(Shard& shard);

  long max_blocks_;
  int max_owners_;
  long blocks_ = 0;
  std::vector<Shard> shards_;
  OwnerSets sets_;
  std::vector<int> free_;                // owners that were never opened, or are forgotten again
  std::vector<int> closing_left_;        // of each owner: shards that may still name it
  std::vector<uint64_t> closing_;        // bits of owners that are being forgotten
  int closing_count_ = 0;
  size_t cursor_ = 0;                    // the shard to sweep next
};

template <class KeyAt>
void BlockIndex::match(const KeyAt& key_at, long blocks, int32_t* depths) const {
  for (int owner = 0; owner < max_owners_; ++owner) depths[owner] = 0;
  if (blocks <= 0) return;
  std::vector<uint64_t> held(static_cast<size_t>(sets_.words())), next(held.size());
  uint32_t set = find(key_at(0));
  sets_.copy_bits(set, held.data());
  long last = 0;  // the last block whose owners are known to be `set`
  while (set != OwnerSets::kEmpty) {
    long other = blocks;  // the first whose owners are known to be others, or the end
    uint32_t others = OwnerSets::kEmpty;
    for (long stride = 1; last + stride < blocks; stride *= 2) {
      const uint32_t found = find(key_at(last + stride));
      if (found != set) {
        other = last + stride;
        others = found;
        break;
      }
      last += stride;
    }
    while (last + 1 < other) {
      const long middle = last + (other - last) / 2;
      const uint32_t found = find(key_at(middle));
      if (found == set) {
        last = middle;
      } else {
        other = middle;
        others = found;
      }
    }
    sets_.copy_bits(others, next.data());
    for (size_t word = 0; word < held.size(); ++word) {
      for (uint64_t gone = held[word] & ~next[word]; gone != 0; gone &= gone - 1)
        depths[word * 64 + static_cast<size_t>(__builtin_ctzll(gone))] = static_cast<int32_t>(other);
      held[word] &= next[word];
    }
    last = other;
    set = others;
  }
}

}  // namespace penstock
