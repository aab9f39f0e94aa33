#include "threads/core_lending.hpp"

#if defined(__linux__) && !defined(PENSTOCK_NO_FUTEX)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#else
#include <thread>
#endif

#include <algorithm>

namespace penstock {
namespace {

constexpr int kLooks = 64;  // at a seat before sleeping: a borrower that only spins there has left by then

#if defined(__linux__) && !defined(PENSTOCK_NO_FUTEX)
// Shared between processes, so not FUTEX_PRIVATE.
void sleep_while(std::atomic<uint32_t>& word, uint32_t value, std::chrono::nanoseconds most) {
  const timespec limit{0, static_cast<long>(most.count())};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, value, &limit, nullptr, 0);
}

void wake(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}
#else
// Without a futex between processes: looks again after a while.
void sleep_while(std::atomic<uint32_t>&, uint32_t, std::chrono::nanoseconds most) {
  std::this_thread::sleep_for(std::min<std::chrono::nanoseconds>(most, std::chrono::microseconds(50)));
}
void wake(std::atomic<uint32_t>&) {}
#endif

}  // namespace

bool Seat::sit_down() {
  static std::atomic<uint32_t> count{0};  // no two tickets in a row are alike
  if (!lent()) return false;
  uint32_t empty = 0;
  const uint32_t ticket = (count.fetch_add(1, std::memory_order_relaxed) + 1) << 8 | borrower;
  if (!seat->word.compare_exchange_strong(empty, ticket)) return false;
  if (lent()) return true;
  get_up();
  return false;
}

void Seat::get_up() {
  seat->word.store(0);
  if (seat->awaited.load() != 0) wake(seat->word);
}

void OwnCores::take() {
  owner_->word.store(1);
  const auto begun = std::chrono::steady_clock::now();
  for (size_t i = 0; i < absent_.size(); ++i) {
    CoreLine& seat = seats_[i];
    uint32_t ticket = seat.word.load();
    for (int look = 0; ticket != 0 && look < kLooks; ++look) ticket = seat.word.load();
    while (ticket != 0 && ticket != absent_[i]) {
      const auto left = kRecallWait - (std::chrono::steady_clock::now() - begun);
      if (left <= left.zero()) {
        absent_[i] = ticket;
        break;
      }
      seat.awaited.store(1);
      sleep_while(seat.word, ticket, left);
      ticket = seat.word.load();
    }
    seat.awaited.store(0);
  }
}

}  // namespace penstock
