// Cores that are lent between processes: who may compute where, kept in shared memory.
//
//     line of an owner     word: 0 while it has nothing to do          written by the owner
//     line of each seat    word: 0 or the ticket of the borrower there  taken and left by borrowers
//
// An owner has one seat for each of its cores.  A borrower sits down only while the owner is idle, looks at the owner's
// word before every piece of work, and gets up as soon as the owner is back; who sits there holds at most one piece of
// work.  Sitting down writes the seat and then reads the owner's word, coming back writes the word and then reads the
// seats, so one of the two sees the other.  A borrower that was stopped or killed keeps its seat until its line is
// cleared; the owner waits for it once, for `kRecallWait`, and never again.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <vector>

namespace penstock {

constexpr auto kRecallWait = std::chrono::microseconds(1000);

struct alignas(64) CoreLine {
  std::atomic<uint32_t> word;
  std::atomic<uint32_t> awaited;  // of a seat: the owner sleeps until it is free
};
static_assert(sizeof(CoreLine) == 64);

// A core of somebody else's, and the logical processors it has (none: wherever the system puts us).
struct Seat {
  CoreLine* owner = nullptr;
  CoreLine* seat = nullptr;
  uint32_t borrower = 0;  // 1 to 255
  std::vector<int> cpus;

  bool lent() const { return owner->word.load() == 0; }
  bool free() const { return seat->word.load(std::memory_order_relaxed) == 0; }
  bool sit_down();  // false when the owner is busy or somebody else sits there
  void get_up();
};

// The owner's side.
class OwnCores {
 public:
  OwnCores(CoreLine* owner, CoreLine* seats, int count) : owner_(owner), seats_(seats), absent_(count) {}

  // I have nothing to do.
  void lend() { owner_->word.store(0); }

  // Takes the cores back: returns when no borrower uses them, or after `kRecallWait`.
  void take();

 private:
  CoreLine* owner_;
  CoreLine* seats_;
  std::vector<uint32_t> absent_;  // tickets that were waited for in vain
};

}  // namespace penstock
