#include "pool.hpp"

#include <pthread.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <thread>
#include <vector>

namespace penstock {
namespace {

constexpr int kMaxThreads = 256;
constexpr auto kSpin = std::chrono::microseconds(50);

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

  void run(uint32_t items, void* call_context, ItemFn call_fn) {
    context = call_context;
    fn = call_fn;
    done.store(0, std::memory_order_relaxed);
    caller_sleeps.store(0, std::memory_order_relaxed);
    ticket.store(items, std::memory_order_release);
    call.fetch_add(1);
    if (sleepers.load() != 0) wake_all(call);
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
    for (auto& thread : threads) thread.join();
  }
};

// The process's pool and scratch.  The only mutable globals of the kernels: threads belong to a process.
int wanted_threads = 1;
Pool* pool = nullptr;
Scratch scratch[kMaxThreads + 1];  // the last one is shared

// The parent's threads do not exist here; their handles are abandoned, not destroyed.
void forget_after_fork() { pool = nullptr; }

Pool* ready_pool() {
  static const int registered = pthread_atfork(nullptr, nullptr, forget_after_fork);
  (void)registered;
  const size_t helpers = static_cast<size_t>(wanted_threads - 1);
  if (pool != nullptr && pool->threads.size() != helpers) {
    pool->end();
    delete pool;
    pool = nullptr;
  }
  if (pool == nullptr && helpers > 0) {
    pool = new Pool;
    for (size_t i = 0; i < helpers; ++i) pool->threads.emplace_back([i] { pool->work(static_cast<int>(i) + 1); });
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

void set_threads(int count) { wanted_threads = count < 1 ? 1 : count > kMaxThreads ? kMaxThreads : count; }

int thread_count() { return wanted_threads; }

void parallel(long items, void* context, ItemFn fn) {
  if (items > 1 && wanted_threads > 1) {
    ready_pool()->run(static_cast<uint32_t>(items), context, fn);
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
