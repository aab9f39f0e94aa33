#include "collectives/shm_group.hpp"

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <thread>

namespace penstock {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kSpinsALook = 64;  // between two looks at the clock and at whether the group is over
constexpr double kMostSleep = 0.05;
constexpr double kMostWait = 3600;
// Tags of labels; those below are of parallel/collectives/shm.py.
constexpr uint32_t kAllReduce = 4, kMax = 5, kColumns = 6;

void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Numbers go round: is `value` at or behind `wanted`?
bool reached(uint32_t value, uint32_t wanted) { return static_cast<int32_t>(value - wanted) >= 0; }

#if defined(__linux__)
void sleep_while(std::atomic<uint32_t>& word, uint32_t value, double seconds) {
  timespec left{static_cast<time_t>(seconds), static_cast<long>((seconds - static_cast<double>(static_cast<time_t>(seconds))) * 1e9)};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, value, &left, nullptr, 0);
}
void wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}
#else
void sleep_while(std::atomic<uint32_t>&, uint32_t, double) { std::this_thread::sleep_for(std::chrono::microseconds(50)); }
void wake_all(std::atomic<uint32_t>&) {}
#endif

void advance(ShmCounter& counter, uint32_t value) {
  counter.value.store(value);
  if (counter.sleepers.load() != 0) wake_all(counter.value);
}

// out[i] = the tree over parts[0][i], parts[1][i], ...
template <int kRanks>
void add_up(const float* const* parts, float* __restrict out, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    float sums[kRanks];
    for (int rank = 0; rank < kRanks; ++rank) sums[rank] = parts[rank][i];
    for (int width = kRanks / 2; width > 0; width /= 2)
      for (int at = 0; at < width; ++at) sums[at] = sums[2 * at] + sums[2 * at + 1];
    out[i] = sums[0];
  }
}

size_t channel_bytes(size_t slot_bytes) { return sizeof(ShmChannel) + 2 * slot_bytes; }

}  // namespace

ShmGroup::ShmGroup(char* memory, int rank, int ranks, size_t slot_bytes, double spin_us)
    : memory_(memory),
      rank_(rank),
      ranks_(ranks),
      slot_bytes_(slot_bytes),
      spin_us_(spin_us),
      sent_(static_cast<size_t>(ranks)),
      received_(static_cast<size_t>(ranks)) {
  static_assert(std::atomic<uint32_t>::is_always_lock_free);
  if (rank < 0 || rank >= ranks) throw std::invalid_argument("no such rank");
  if (slot_bytes == 0 || slot_bytes % 64 != 0) throw std::invalid_argument("a slot has a multiple of 64 bytes");
}

size_t ShmGroup::bytes_needed(int ranks, size_t slot_bytes) {
  const auto count = static_cast<size_t>(ranks);
  return sizeof(ShmCounter) + (count + count * count) * channel_bytes(slot_bytes);
}

ShmChannel* ShmGroup::channel(long index) const {
  return reinterpret_cast<ShmChannel*>(memory_ + sizeof(ShmCounter) + static_cast<size_t>(index) * channel_bytes(slot_bytes_));
}

const char* ShmGroup::buffer(const ShmChannel* channel, uint32_t sequence) const {
  return reinterpret_cast<const char*>(channel + 1) + (sequence & 1) * slot_bytes_;
}

void ShmGroup::write(ShmChannel* channel, uint32_t sequence, const void* data, const ShmLabel& label) {
  if (label.bytes > slot_bytes_) throw std::invalid_argument("a piece is larger than a slot");
  if (over()) throw std::runtime_error("the group is over");
  channel->labels[sequence & 1] = label;
  std::memcpy(const_cast<char*>(buffer(channel, sequence)), data, label.bytes);
  advance(channel->posted, sequence);
}

void ShmGroup::post(const void* data, const ShmLabel& label) { write(to_all(rank_), ++sequence_, data, label); }

bool ShmGroup::await(int rank, double seconds) { return wait(to_all(rank)->posted, sequence_, seconds); }

bool ShmGroup::send(int to, const void* data, const ShmLabel& label, double seconds) {
  uint32_t& sent = sent_[static_cast<size_t>(to)];
  if (!wait(pair(rank_, to)->taken, sent - 1, seconds)) return false;
  write(pair(rank_, to), ++sent, data, label);
  return true;
}

bool ShmGroup::await_sent(int from, double seconds) { return wait(pair(from, rank_)->posted, received(from), seconds); }

void ShmGroup::release(int from) { advance(pair(from, rank_)->taken, ++received_[static_cast<size_t>(from)]); }

// Posts a piece and waits for those of all others, which must have the same label but for its length.
void ShmGroup::exchange(const void* piece, const ShmLabel& label) {
  post(piece, label);
  for (int rank = 0; rank < ranks_; ++rank) {
    while (!await(rank, kMostWait)) {
    }
    const ShmLabel& theirs = this->label(rank);
    if (theirs.tag != label.tag || theirs.rows != label.rows || theirs.total != label.total) {
      end();
      throw std::runtime_error("ranks exchange different values");
    }
  }
}

void ShmGroup::all_reduce_max(uint64_t* values, size_t count) {
  const size_t most = slot_bytes_ / sizeof(uint64_t);
  for (size_t first = 0; first < count; first += most) {
    const size_t n = std::min(most, count - first);
    exchange(values + first, {kMax, 1, count * sizeof(uint64_t), n * sizeof(uint64_t)});
    for (int rank = 0; rank < ranks_; ++rank) {
      const auto* theirs = static_cast<const uint64_t*>(data(rank));
      for (size_t i = 0; i < n; ++i) values[first + i] = std::max(values[first + i], theirs[i]);
    }
  }
}

void ShmGroup::gather_columns(const float* values, long rows, const std::vector<long>& widths, float* out) {
  const auto all = static_cast<size_t>(std::accumulate(widths.begin(), widths.end(), 0L));
  const size_t most = slot_bytes_ / sizeof(float), widest = static_cast<size_t>(*std::max_element(widths.begin(), widths.end()));
  const size_t own = static_cast<size_t>(rows * widths[static_cast<size_t>(rank_)]);
  for (size_t first = 0; first < widest * static_cast<size_t>(rows); first += most) {
    const size_t n = first < own ? std::min(most, own - first) : 0;
    exchange(values + std::min(first, own), {kColumns, static_cast<uint32_t>(rows), all, n * sizeof(float)});
    if (out == nullptr) continue;
    size_t left = 0;  // of the rank's columns
    for (int rank = 0; rank < ranks_; ++rank) {
      const auto width = static_cast<size_t>(widths[static_cast<size_t>(rank)]);
      const auto* theirs = static_cast<const float*>(data(rank));
      const size_t end = first + label(rank).bytes / sizeof(float);
      for (size_t at = first; at < end;) {  // row by row, from the middle of one to that of another
        const size_t row = at / width, column = at % width, count = std::min(width - column, end - at);
        std::copy_n(theirs + (at - first), count, out + row * all + left + column);
        at += count;
      }
      left += width;
    }
  }
}

void ShmGroup::all_reduce(float* values, size_t count, uint32_t rows) {
  const size_t most = slot_bytes_ / sizeof(float);
  for (size_t first = 0; first < count; first += most) {
    const size_t n = std::min(most, count - first);
    exchange(values + first, {kAllReduce, rows, count * sizeof(float), n * sizeof(float)});
    const float* parts[8] = {};
    for (int rank = 0; rank < ranks_; ++rank) parts[rank] = static_cast<const float*>(data(rank));
    switch (ranks_) {
      case 1: break;
      case 2: add_up<2>(parts, values + first, n); break;
      case 4: add_up<4>(parts, values + first, n); break;
      case 8: add_up<8>(parts, values + first, n); break;
      default: throw std::invalid_argument("1, 2, 4 or 8 ranks add up their values");
    }
  }
}

void ShmGroup::end() {
  header()->value.store(1);
  for (long index = 0; index < ranks_ + static_cast<long>(ranks_) * ranks_; ++index) {
    wake_all(channel(index)->posted.value);
    wake_all(channel(index)->taken.value);
  }
}

bool ShmGroup::wait(ShmCounter& counter, uint32_t wanted, double seconds) const {
  uint32_t seen = counter.value.load(std::memory_order_acquire);
  if (reached(seen, wanted)) return true;
  const auto begun = Clock::now();
  const auto spin = std::chrono::duration<double, std::micro>(spin_us_), most = std::chrono::duration<double, std::micro>(seconds * 1e6);
  for (;;) {
    if (over()) throw std::runtime_error("the group is over");
    const auto waited = std::chrono::duration<double, std::micro>(Clock::now() - begun);
    if (waited > most) return false;
    if (waited < spin) {
      for (int i = 0; i < kSpinsALook; ++i) {
        if (reached(counter.value.load(std::memory_order_acquire), wanted)) return true;
        pause_briefly();
      }
      continue;
    }
    const double left = (most - waited).count() / 1e6;
    counter.sleepers.fetch_add(1);
    seen = counter.value.load();
    if (!reached(seen, wanted) && !over()) sleep_while(counter.value, seen, left < kMostSleep ? left : kMostSleep);
    counter.sleepers.fetch_sub(1);
    if (reached(counter.value.load(), wanted)) return true;
  }
}

}  // namespace penstock
