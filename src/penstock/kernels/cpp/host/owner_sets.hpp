// Sets of owners, each kept once: a block of the index names its set by a number of four bytes.
//
// Set 0 is empty, sets 1 to max_owners have one owner each; sets of several are counted, and given up with the last
// block that names them.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

namespace penstock {

class OwnerSets {
 public:
  explicit OwnerSets(int max_owners)
      : owners_(max_owners), words_((max_owners + 63) / 64), scratch_(static_cast<size_t>(words_)) {}

  static constexpr uint32_t kEmpty = 0;
  static uint32_t single(int owner) { return static_cast<uint32_t>(owner) + 1; }

  int words() const { return words_; }

  bool has(uint32_t set, int owner) const {
    if (set <= static_cast<uint32_t>(owners_)) return set == single(owner);
    return (bits_of(set)[owner / 64] >> (owner % 64)) & 1;
  }

  // The set with one owner more, or less.  Nobody holds it yet.
  uint32_t with(uint32_t set, int owner) {
    if (set == kEmpty) return single(owner);
    if (has(set, owner)) return set;
    copy_bits(set, scratch_.data());
    scratch_[static_cast<size_t>(owner / 64)] |= uint64_t{1} << (owner % 64);
    return interned();
  }
  uint32_t without(uint32_t set, int owner) {
    if (!has(set, owner)) return set;
    if (set <= static_cast<uint32_t>(owners_)) return kEmpty;
    copy_bits(set, scratch_.data());
    scratch_[static_cast<size_t>(owner / 64)] &= ~(uint64_t{1} << (owner % 64));
    return interned();
  }
  // The set less all owners whose bits are in `mask`.
  uint32_t without_all(uint32_t set, const std::vector<uint64_t>& mask) {
    if (set == kEmpty) return set;
    copy_bits(set, scratch_.data());
    bool changed = false;
    for (size_t word = 0; word < scratch_.size(); ++word) {
      changed |= (scratch_[word] & mask[word]) != 0;
      scratch_[word] &= ~mask[word];
    }
    return changed ? interned() : set;
  }

  void retain(uint32_t set) {
    if (set > static_cast<uint32_t>(owners_)) ++several_[index_of(set)].references;
  }
  void release(uint32_t set) {
    if (set <= static_cast<uint32_t>(owners_)) return;
    Several& several = several_[index_of(set)];
    if (--several.references != 0) return;
    by_hash_.erase(several.hash);
    free_.push_back(set);
  }

  // Writes the set's bits, owner 0 in the lowest bit of the first word.
  void copy_bits(uint32_t set, uint64_t* to) const {
    if (set > static_cast<uint32_t>(owners_)) {
      const uint64_t* from = bits_of(set);
      for (int word = 0; word < words_; ++word) to[word] = from[word];
      return;
    }
    for (int word = 0; word < words_; ++word) to[word] = 0;
    if (set != kEmpty) to[(set - 1) / 64] = uint64_t{1} << ((set - 1) % 64);
  }

  uint64_t memory_bytes() const {
    return several_.capacity() * sizeof(Several) + bits_.capacity() * 8 + by_hash_.size() * 40;
  }

 private:
  struct Several {
    uint64_t hash;  // under which it is found
    uint64_t references;
  };

  size_t index_of(uint32_t set) const { return set - static_cast<uint32_t>(owners_) - 1; }
  const uint64_t* bits_of(uint32_t set) const { return bits_.data() + index_of(set) * static_cast<size_t>(words_); }

  static uint64_t mixed(uint64_t x) {  // splitmix64's finisher (Steele, Lea, Flood 2014)
    x += 0x9e3779b97f4a7c15;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return x ^ (x >> 31);
  }

  // The number of the set whose bits are in scratch_.
  uint32_t interned() {
    int count = 0, last = 0;
    uint64_t hash = 0;
    for (size_t word = 0; word < scratch_.size(); ++word) {
      count += __builtin_popcountll(scratch_[word]);
      if (scratch_[word] != 0) last = static_cast<int>(word) * 64 + 63 - __builtin_clzll(scratch_[word]);
      hash = mixed(hash ^ scratch_[word]);
    }
    if (count <= 1) return count == 0 ? kEmpty : single(last);
    for (auto found = by_hash_.find(hash); found != by_hash_.end(); found = by_hash_.find(++hash))
      if (same_bits(found->second)) return found->second;
    return made(hash);
  }

  bool same_bits(uint32_t set) const {
    const uint64_t* bits = bits_of(set);
    for (size_t word = 0; word < scratch_.size(); ++word)
      if (bits[word] != scratch_[word]) return false;
    return true;
  }

  uint32_t made(uint64_t hash) {
    uint32_t set;
    if (free_.empty()) {
      set = static_cast<uint32_t>(owners_) + 1 + static_cast<uint32_t>(several_.size());
      several_.push_back({});
      bits_.resize(bits_.size() + scratch_.size());
    } else {
      set = free_.back();
      free_.pop_back();
    }
    several_[index_of(set)] = {hash, 0};
    for (size_t word = 0; word < scratch_.size(); ++word)
      bits_[index_of(set) * scratch_.size() + word] = scratch_[word];
    by_hash_.emplace(hash, set);
    return set;
  }

  int owners_;
  int words_;
  std::vector<uint64_t> scratch_;
  std::vector<Several> several_;
  std::vector<uint64_t> bits_;  // words_ a set of several
  std::vector<uint32_t> free_;
  std::unordered_map<uint64_t, uint32_t> by_hash_;
};

}  // namespace penstock
