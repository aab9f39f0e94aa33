// Ranks of one host that exchange bytes through memory that all of them map.  Only `all_reduce` computes, in the one order
// that sums over ranks have.
//
//     header             over: the group has ended
//     one channel a rank     to all others       posted | two labels, two buffers
//     one channel a pair     from one to another posted, taken | two labels, two buffers
//
// Who sends writes a buffer, then the number of the operation; who receives waits for that number and reads the buffer in
// place.  Buffers alternate.  To all: a rank posts operation n only when it has read what all others posted for n - 1, so
// whoever posts n has read n - 2, whose buffer it writes: there is no second meeting.  To one: the receiver says what it has
// taken, and the sender is at most two ahead.
//
// Waiting is spinning for a while, then sleeping on the number (futex).  A counter that somebody sleeps on says so, so posting
// costs a system call only then.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace penstock {

// What is in a buffer.
struct alignas(64) ShmLabel {
  uint32_t tag;    // which operation, as all ranks call it
  uint32_t rows;   // of the whole array
  uint64_t total;  // bytes of the whole array, of which this is a piece
  uint64_t bytes;  // of this piece
};

struct alignas(64) ShmCounter {
  std::atomic<uint32_t> value;
  std::atomic<uint32_t> sleepers;
};

struct ShmChannel {
  ShmCounter posted;
  ShmCounter taken;
  ShmLabel labels[2];
};

// One rank's side.  Zeroed memory is a group that has not begun.  One thread at a time.
class ShmGroup {
 public:
  // `memory` has bytes_needed; a piece has up to `slot_bytes`, a multiple of 64.
  ShmGroup(char* memory, int rank, int ranks, size_t slot_bytes, double spin_us);

  static size_t bytes_needed(int ranks, size_t slot_bytes);

  // To all: the next operation of this rank.
  void post(const void* data, const ShmLabel& label);
  // Has `rank` posted this operation?  Waits for it up to `seconds`; its label and its bytes are then there until the next post.
  bool await(int rank, double seconds);
  const ShmLabel& label(int rank) const { return to_all(rank)->labels[sequence_ & 1]; }
  const void* data(int rank) const { return buffer(to_all(rank), sequence_); }

  // To one: false, and nothing sent, when the receiver has not made room within `seconds`.
  bool send(int to, const void* data, const ShmLabel& label, double seconds);
  // From one: waits up to `seconds`; what came is there until `release`.
  bool await_sent(int from, double seconds);
  const ShmLabel& sent_label(int from) const { return pair(from, rank_)->labels[received(from) & 1]; }
  const void* sent_data(int from) const { return buffer(pair(from, rank_), received(from)); }
  void release(int from);

  // Ends the group for all ranks: who waits is woken.
  void end();
  bool over() const { return header()->value.load() != 0; }

  // values [count], of `rows` rows = the sum of all ranks' values by the tree of kernels/sum_tree.py: neighbors, then pairs.
  // Of 1, 2, 4 or 8 ranks.  Throws std::runtime_error when ranks exchange other values, or the group has ended.
  void all_reduce(float* values, size_t count, uint32_t rows);
  // values [count] = the largest that any rank has, one by one.  Throws as above.
  void all_reduce_max(uint64_t* values, size_t count);
  // out [rows, sum of widths] = the ranks' columns side by side; rank r gives values [rows, widths[r]].  A rank that does not
  // want them has no `out`.  Throws as above.
  void gather_columns(const float* values, long rows, const std::vector<long>& widths, float* out);

  int rank() const { return rank_; }
  int ranks() const { return ranks_; }
  size_t slot_bytes() const { return slot_bytes_; }

 private:
  ShmCounter* header() const { return reinterpret_cast<ShmCounter*>(memory_); }
  ShmChannel* channel(long index) const;
  ShmChannel* to_all(int rank) const { return channel(rank); }
  ShmChannel* pair(int from, int to) const { return channel(ranks_ + from * ranks_ + to); }
  const char* buffer(const ShmChannel* channel, uint32_t sequence) const;
  uint32_t received(int from) const { return received_[static_cast<size_t>(from)] + 1; }
  void write(ShmChannel* channel, uint32_t sequence, const void* data, const ShmLabel& label);
  bool wait(ShmCounter& counter, uint32_t wanted, double seconds) const;
  void exchange(const void* piece, const ShmLabel& label);

  char* memory_;
  int rank_, ranks_;
  size_t slot_bytes_;
  double spin_us_;
  uint32_t sequence_ = 0;
  std::vector<uint32_t> sent_, received_;
};

}  // namespace penstock
