// Attention without a cache: keys and values of one call laid out as pages that last as long as the call.  So encoders
// share the kernels of paged attention, and with them its order of sums: 64 keys at a time by place in their sequence.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "attention/attention_partitions.hpp"

namespace penstock {

// How whole sequences attend; see kernels/ops.py.
struct OnceArgs {
  const float* qkv;  // [tokens, (heads + 2 * kv_heads) * head_dim]
  RopeView rope;
  const int32_t* rows;    // [tokens]: of the table; null: each token's place in its sequence
  const int32_t* starts;  // [sequences + 1]
  long sequences;
  int heads;
  int kv_heads;
  int head_dim;
  KeyRule rule;
  Softmax softmax;
  BiasView bias;
  void* out;  // [tokens, heads * head_dim]
};

class AttentionOnce {
 public:
  void run(const Family& family, Compute compute, const OnceArgs& args) {
    const int per_cell = compute == Compute::kBf16 ? 2 : 1;
    const BatchView batch = lay_out(args.starts, args.sequences);
    KvView kv{nullptr, pages_, 1, args.kv_heads, args.head_dim, args.head_dim, false, per_cell};
    const size_t cells = static_cast<size_t>(pages_) * kv.page_cells();
    const size_t queries = static_cast<size_t>(batch.tokens) * args.heads * args.head_dim / per_cell;
    if (memory_.size() < cells + queries) memory_ = Cells(cells + queries);
    kv.cells = memory_.data();
    void* q = kv.cells + cells;
    const int32_t* rows = args.rows == nullptr ? batch.positions : args.rows;
    family.rope_and_write({args.qkv, args.rope, rows, nullptr, sequence_of_.data(), batch, kv, 0, args.heads, q}, compute);
    AttentionArgs attention;
    cut_.cut(kv, batch, args.heads, args.rule, attention);
    attention.q = q;
    attention.layer = 0;
    attention.softmax = args.softmax;
    attention.bias = args.bias;
    attention.out = args.out;
    family.attention(attention, compute);
  }

 private:
  // Cells not yet written; a page's cells begin at a line of the cache.
  class Cells {
   public:
    Cells() = default;
    explicit Cells(size_t count) : size_(count), memory_(new Line[(count + 15) / 16]) {}
    size_t size() const { return size_; }
    uint32_t* data() const { return memory_.get()->cells; }

   private:
    struct alignas(64) Line {
      uint32_t cells[16];
    };
    size_t size_ = 0;
    std::unique_ptr<Line[]> memory_;
  };

  // Every sequence begins at position 0, in pages of its own.
  BatchView lay_out(const int32_t* starts, long sequences) {
    long width = 1;
    for (long s = 0; s < sequences; ++s) width = std::max(width, pages_of(starts[s + 1] - starts[s]));
    const long tokens = starts[sequences];
    positions_.resize(static_cast<size_t>(tokens));
    sequence_of_.resize(static_cast<size_t>(tokens));
    table_.assign(static_cast<size_t>(sequences * width), 0);
    pages_ = 0;
    for (long s = 0; s < sequences; ++s) {
      for (int32_t t = starts[s]; t < starts[s + 1]; ++t) {
        positions_[static_cast<size_t>(t)] = t - starts[s];
        sequence_of_[static_cast<size_t>(t)] = static_cast<int32_t>(s);
      }
      for (long i = 0; i < pages_of(starts[s + 1] - starts[s]); ++i)
        table_[static_cast<size_t>(s * width + i)] = static_cast<int32_t>(pages_++);
    }
    return {positions_.data(), starts, table_.data(), tokens, sequences, width};
  }

  static long pages_of(long tokens) { return (tokens + kPageTokens - 1) / kPageTokens; }

  std::vector<int32_t> positions_, sequence_of_, table_;
  long pages_ = 0;
  Cells memory_;
  AttentionCut cut_;
};

}  // namespace penstock
