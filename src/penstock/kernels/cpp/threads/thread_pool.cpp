#include "threads/thread_pool.hpp"

#include <pthread.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <thread>
#include <utility>
#include <vector>

namespace penstock {
namespace {

constexpr int kMaxThreads = 256;
constexpr auto kSpin = std::chrono::microseconds(50);
constexpr double kWakeGuestsFrom = 1 << 18;  // of a call's work: once awake, a guest stays for the calls of the step

void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

#if defined(__linux__) && !defined(PENSTOCK_NO_FUTEX)
void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}
void wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
}
#else
void sleep_while(std::atomic<uint32_t>& word, uint32_t value) { word.wait(value); }
void wake_all(std::atomic<uint32_t>& word) { word.notify_all(); }
#endif

// A thread that works at somebody else's core.
struct Guest {
  Seat seat;
  std::atomic<uint32_t> calls{0};  // counts calls that are worth waking for; sleeps on it
  std::atomic<uint32_t> sleeps{0};

  explicit Guest(Seat where) : seat(std::move(where)) {}
  Guest(Guest&& other) noexcept : seat(std::move(other.seat)) {}  // before its thread starts

  void wake() {
    calls.fetch_add(1);
    if (sleeps.exchange(0) != 0) wake_all(calls);
  }
};

struct Scratch {
  void* data = nullptr;
  size_t bytes = 0;
};

// One call's items are claimed from `ticket` (next item << 32 | items).  A claim that succeeds belongs to the current
// call, which cannot return before that item is done, so `context` and `fn` may be read after it.
struct Pool {
  std::atomic<uint64_t> ticket{0};
  std::atomic<uint32_t> call{0};      // counts calls; workers sleep on it
  std::atomic<uint32_t> sleepers{0};  // workers asleep or about to be
  std::atomic<uint32_t> done{0};      // finished items; the caller sleeps on it
  std::atomic<uint32_t> caller_sleeps{0};
  std::atomic<bool> stop{false};
  void* context = nullptr;
  ItemFn fn = nullptr;
  std::vector<std::thread> threads;
  std::vector<Guest> guests;
  std::atomic<uint32_t> seated{0};    // guests that are awake
  std::atomic<uint64_t> guest_ns{0};  // computed by guests

  bool run_one(int worker) {
    uint64_t seen = ticket.load(std::memory_order_acquire);
    for (;;) {
      const uint64_t next = seen >> 32, items = seen & 0xFFFFFFFFu;
      if (next >= items) return false;
      if (ticket.compare_exchange_weak(seen, seen + (uint64_t{1} << 32), std::memory_order_acq_rel)) {
        fn(context, static_cast<long>(next), worker);
        if (done.fetch_add(1, std::memory_order_acq_rel) + 1 == items && caller_sleeps.load()) wake_all(done);
        return true;
      }
    }
  }

  void work(int worker) {
    uint32_t seen = call.load(std::memory_order_acquire);
    while (!stop.load(std::memory_order_relaxed)) {
      while (run_one(worker)) {
      }
      const auto until = std::chrono::steady_clock::now() + kSpin;
      while (call.load(std::memory_order_acquire) == seen && std::chrono::steady_clock::now() < until)
        for (int i = 0; i < 16; ++i) pause_briefly();
      sleepers.fetch_add(1);
      while (call.load() == seen && !stop.load()) sleep_while(call, seen);
      sleepers.fetch_sub(1);
      seen = call.load(std::memory_order_acquire);
    }
  }

  // The same as a guest: only while the seat's owner is idle, and away at once when it is not.
  void visit(Guest& guest, int worker) {
    settle(guest.seat.cpus);
    while (!stop.load(std::memory_order_relaxed)) {
      const uint32_t called = guest.calls.load();
      if (guest.seat.sit_down()) {
        seated.fetch_add(1, std::memory_order_relaxed);
        help(guest.seat, worker);
        seated.fetch_sub(1, std::memory_order_relaxed);
        guest.seat.get_up();
      }
      guest.sleeps.store(1);
      while (guest.calls.load() == called && !stop.load()) sleep_while(guest.calls, called);
      guest.sleeps.store(0);
    }
  }

  void help(const Seat& seat, int worker) {
    auto now = std::chrono::steady_clock::now();
    auto until = now + kSpin;
    while (seat.lent() && now < until && !stop.load(std::memory_order_relaxed)) {
      if (run_one(worker)) {
        const auto begun = std::exchange(now, std::chrono::steady_clock::now());
        guest_ns.fetch_add(static_cast<uint64_t>((now - begun).count()), std::memory_order_relaxed);
        until = now + kSpin;
        continue;
      }
      for (int i = 0; i < 16; ++i) pause_briefly();
      now = std::chrono::steady_clock::now();
    }
  }

  static void settle(const std::vector<int>& cpus) {
#if defined(__linux__)
    if (cpus.empty()) return;
    cpu_set_t set;
    CPU_ZERO(&set);
    for (int cpu : cpus)
      if (cpu < CPU_SETSIZE) CPU_SET(cpu, &set);
    sched_setaffinity(0, sizeof(set), &set);  // should it fail, the system decides
#else
    (void)cpus;
#endif
  }

  // Would the caller work alone, so that it need not share?
  bool alone(double work) const {
    return threads.size() == guests.size() && work < kWakeGuestsFrom && seated.load(std::memory_order_relaxed) == 0;
  }

  void run(uint32_t items, void* call_context, ItemFn call_fn, double work) {
    context = call_context;
    fn = call_fn;
    done.store(0, std::memory_order_relaxed);
    caller_sleeps.store(0, std::memory_order_relaxed);
    ticket.store(items, std::memory_order_release);
    call.fetch_add(1);
    if (sleepers.load() != 0) wake_all(call);
    if (work >= kWakeGuestsFrom)
      for (Guest& guest : guests)
        if (guest.sleeps.load(std::memory_order_relaxed) != 0 && guest.seat.lent() && guest.seat.free()) guest.wake();
    while (run_one(0)) {
    }
    const auto until = std::chrono::steady_clock::now() + kSpin;
    uint32_t finished;
    while ((finished = done.load(std::memory_order_acquire)) != items) {
      if (std::chrono::steady_clock::now() < until) {
        for (int i = 0; i < 16; ++i) pause_briefly();
        continue;
      }
      caller_sleeps.store(1);
      finished = done.load();
      if (finished != items) sleep_while(done, finished);
    }
  }

  void end() {
    stop.store(true);
    call.fetch_add(1);
    wake_all(call);
    for (Guest& guest : guests) guest.wake();
    for (auto& thread : threads) thread.join();
  }
};

// The process's pool and scratch.  The only mutable globals of the kernels: threads belong to a process.
int wanted_threads = 1;
std::vector<Seat> wanted_guests;
double earlier_guest_seconds = 0;
Pool* pool = nullptr;
Scratch scratch[kMaxThreads + 1];  // the last one is shared

// The parent's threads do not exist here; their handles are abandoned, not destroyed.
void forget_after_fork() { pool = nullptr; }

void end_pool() {
  if (pool == nullptr) return;
  pool->end();
  earlier_guest_seconds += static_cast<double>(pool->guest_ns.load()) * 1e-9;
  delete pool;
  pool = nullptr;
}

Pool* ready_pool() {
  static const int registered = pthread_atfork(nullptr, nullptr, forget_after_fork);
  (void)registered;
  const size_t own = static_cast<size_t>(wanted_threads - 1), all = static_cast<size_t>(hands() - 1);
  if (pool != nullptr && (pool->threads.size() != all || pool->guests.size() != all - own)) end_pool();
  if (pool == nullptr) {
    pool = new Pool;
    for (size_t i = 0; i < own; ++i) pool->threads.emplace_back([i] { pool->work(static_cast<int>(i) + 1); });
    for (size_t i = own; i < all; ++i) pool->guests.emplace_back(wanted_guests[i - own]);
    for (size_t i = 0; i < pool->guests.size(); ++i)
      pool->threads.emplace_back([i, own] { pool->visit(pool->guests[i], static_cast<int>(own + i) + 1); });
  }
  return pool;
}

// Scratch memory grows in large steps; under the address sanitizer it is as long as was asked for, and new each time.
#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kScratchAlignment = 64;
size_t scratch_bytes(size_t bytes) { return (bytes + 63) / 64 * 64; }
bool suffices(const Scratch&, size_t) { return false; }
#else
constexpr size_t kScratchAlignment = 4096;
size_t scratch_bytes(size_t bytes) { return (bytes + bytes / 4 + 4095) / 4096 * 4096; }
bool suffices(const Scratch& own, size_t bytes) { return own.bytes >= bytes; }
#endif

}  // namespace

void set_threads(int count) {
  wanted_threads = count < 1 ? 1 : count > kMaxThreads ? kMaxThreads : count;
}

int thread_count() { return wanted_threads; }

void set_guests(std::vector<Seat> seats) {
  end_pool();
  wanted_guests = std::move(seats);
}

int hands() { return std::min(kMaxThreads, wanted_threads + static_cast<int>(wanted_guests.size())); }

double guest_seconds() {
  return earlier_guest_seconds + (pool == nullptr ? 0 : static_cast<double>(pool->guest_ns.load()) * 1e-9);
}

void parallel(long items, void* context, ItemFn fn, double work) {
  Pool* const ready = items > 1 && hands() > 1 ? ready_pool() : nullptr;
  if (ready != nullptr && !ready->alone(work)) {
    ready->run(static_cast<uint32_t>(items), context, fn, work);
    return;
  }
  for (long item = 0; item < items; ++item) fn(context, item, 0);
}

void* workspace(int worker, size_t bytes) {
  Scratch& own = scratch[worker];
  if (!suffices(own, bytes)) {
    std::free(own.data);
    own.bytes = scratch_bytes(bytes);
    own.data = std::aligned_alloc(kScratchAlignment, own.bytes);
    if (own.data == nullptr) {
      own.bytes = 0;
      throw std::bad_alloc();
    }
  }
  return own.data;
}

void* shared_workspace(size_t bytes) { return workspace(kMaxThreads, bytes); }

}  // namespace penstock
