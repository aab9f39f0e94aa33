// The table of the block index: open addressing with linear probing, places freed by moving later ones back.
#include "host/block_index.hpp"

#include <limits>
#include <numeric>
#include <stdexcept>
#include <unordered_map>

namespace penstock {
namespace {

constexpr long kLeastPlaces = 16;
constexpr int kAhead = 8;  // keys whose places are asked for before they are needed

}  // namespace

BlockIndex::BlockIndex(long max_blocks, int max_owners)
    : max_blocks_(max_blocks),
      max_owners_(max_owners),
      shards_(size_t{1} << kShardBits),
      sets_(max_owners),
      free_(static_cast<size_t>(max_owners)),
      closing_left_(static_cast<size_t>(max_owners)),
      closing_(static_cast<size_t>((max_owners + 63) / 64)) {
  for (int owner = 0; owner < max_owners; ++owner) free_[static_cast<size_t>(owner)] = max_owners - 1 - owner;
}

std::optional<int> BlockIndex::open() {
  if (free_.empty()) sweep(std::numeric_limits<long>::max());
  if (free_.empty()) return std::nullopt;
  const int owner = free_.back();
  free_.pop_back();
  return owner;
}

void BlockIndex::close(int owner) {
  check(owner);
  uint64_t& word = closing_[static_cast<size_t>(owner / 64)];
  const uint64_t bit = uint64_t{1} << (owner % 64);
  if (word & bit) return;
  word |= bit;
  closing_left_[static_cast<size_t>(owner)] = static_cast<int>(shards_.size());
  ++closing_count_;
}

void BlockIndex::sweep(long places) {
  while (places > 0 && closing_count_ > 0) {
    places -= 1 + static_cast<long>(shards_[cursor_].keys.size());
    clean(shards_[cursor_]);
    cursor_ = (cursor_ + 1) % shards_.size();
    for (int owner = 0; owner < max_owners_; ++owner) {
      uint64_t& word = closing_[static_cast<size_t>(owner / 64)];
      const uint64_t bit = uint64_t{1} << (owner % 64);
      if ((word & bit) == 0 || --closing_left_[static_cast<size_t>(owner)] > 0) continue;
      word &= ~bit;
      --closing_count_;
      free_.push_back(owner);
    }
  }
}

// Takes owners that are being forgotten out of one shard.
void BlockIndex::clean(Shard& shard) {
  std::unordered_map<uint32_t, uint32_t> known;  // what becomes of each set; all of them are held until the end
  for (long place = 0; place < static_cast<long>(shard.keys.size());) {
    if (shard.keys[static_cast<size_t>(place)] == 0) {
      ++place;
      continue;
    }
    const uint32_t set = shard.sets[static_cast<size_t>(place)];
    auto found = known.find(set);
    if (found == known.end()) {
      found = known.emplace(set, sets_.without_all(set, closing_)).first;
      sets_.retain(found->second);
      sets_.retain(set);
    }
    assign(shard, place, found->second);
    if (found->second != OwnerSets::kEmpty) ++place;  // or another block has come to this place
  }
  for (const auto& [set, left] : known) {
    sets_.release(left);
    sets_.release(set);
  }
}

long BlockIndex::add(int owner, const uint64_t* keys, long count) {
  check(owner);
  long refused = 0;
  for (long i = 0; i < count; ++i) {
    if (i + kAhead < count) {
      const uint64_t ahead = whole(keys[i + kAhead]);
      const Shard& shard = shard_of(ahead);
      if (!shard.keys.empty()) __builtin_prefetch(&shard.keys[static_cast<size_t>(shard.home(ahead))]);
    }
    const uint64_t key = whole(keys[i]);
    Shard& shard = shard_of(key);
    long place = shard.keys.empty() ? -1 : shard.place_of(key);
    if (place >= 0 && shard.keys[static_cast<size_t>(place)] == key) {
      assign(shard, place, sets_.with(shard.sets[static_cast<size_t>(place)], owner));
      continue;
    }
    if (blocks_ >= max_blocks_) {
      ++refused;
      continue;
    }
    if ((shard.used + 1) * 5 > static_cast<long>(shard.keys.size()) * 4) {
      shard.grow();
      place = shard.place_of(key);
    }
    shard.keys[static_cast<size_t>(place)] = key;
    shard.sets[static_cast<size_t>(place)] = OwnerSets::single(owner);
    ++shard.used;
    ++blocks_;
  }
  return refused;
}

void BlockIndex::remove(int owner, const uint64_t* keys, long count) {
  check(owner);
  for (long i = 0; i < count; ++i) {
    const uint64_t key = whole(keys[i]);
    Shard& shard = shard_of(key);
    if (shard.keys.empty()) continue;
    const long place = shard.place_of(key);
    if (shard.keys[static_cast<size_t>(place)] == key)
      assign(shard, place, sets_.without(shard.sets[static_cast<size_t>(place)], owner));
  }
}

bool BlockIndex::has(int owner, uint64_t key) const {
  check(owner);
  const uint32_t set = find(key);
  return set != OwnerSets::kEmpty && sets_.has(set, owner);
}

uint64_t BlockIndex::memory_bytes() const {
  const uint64_t tables = std::accumulate(shards_.begin(), shards_.end(), uint64_t{0}, [](uint64_t sum, const Shard& s) {
    return sum + s.keys.capacity() * sizeof(uint64_t) + s.sets.capacity() * sizeof(uint32_t) + sizeof(Shard);
  });
  return tables + sets_.memory_bytes();
}

uint32_t BlockIndex::find(uint64_t key) const {
  key = whole(key);
  const Shard& shard = shard_of(key);
  if (shard.keys.empty()) return OwnerSets::kEmpty;
  const auto place = static_cast<size_t>(shard.place_of(key));
  return shard.keys[place] == key ? shard.sets[place] : OwnerSets::kEmpty;
}

// A block's owners are `set` from now on; a block without owners is removed.
void BlockIndex::assign(Shard& shard, long place, uint32_t set) {
  const uint32_t before = shard.sets[static_cast<size_t>(place)];
  if (set == before) return;
  sets_.retain(set);
  sets_.release(before);
  if (set != OwnerSets::kEmpty) {
    shard.sets[static_cast<size_t>(place)] = set;
    return;
  }
  shard.erase(place);
  --blocks_;
}

void BlockIndex::check(int owner) const {
  if (owner < 0 || owner >= max_owners_) throw std::invalid_argument("no such owner");
}

long BlockIndex::Shard::place_of(uint64_t key) const {
  long place = home(key);
  while (keys[static_cast<size_t>(place)] != 0 && keys[static_cast<size_t>(place)] != key) place = after(place);
  return place;
}

void BlockIndex::Shard::grow() {
  const size_t places = keys.empty() ? kLeastPlaces : keys.size() + keys.size() / 4;
  std::vector<uint64_t> old_keys(places);
  std::vector<uint32_t> old_sets(places);
  old_keys.swap(keys);
  old_sets.swap(sets);
  for (size_t place = 0; place < old_keys.size(); ++place) {
    if (old_keys[place] == 0) continue;
    const auto to = static_cast<size_t>(place_of(old_keys[place]));
    keys[to] = old_keys[place];
    sets[to] = old_sets[place];
  }
}

// Frees a place.  Whatever lies behind it and was pushed there by it moves up, so that no search ends too early.
void BlockIndex::Shard::erase(long place) {
  long hole = place;
  for (long next = after(hole); keys[static_cast<size_t>(next)] != 0; next = after(next)) {
    const long wants = home(keys[static_cast<size_t>(next)]);
    const bool stays = hole <= next ? (hole < wants && wants <= next) : (hole < wants || wants <= next);
    if (stays) continue;
    keys[static_cast<size_t>(hole)] = keys[static_cast<size_t>(next)];
    sets[static_cast<size_t>(hole)] = sets[static_cast<size_t>(next)];
    hole = next;
  }
  keys[static_cast<size_t>(hole)] = 0;
  --used;
}

}  // namespace penstock
