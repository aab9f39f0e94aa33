// The cut of a step's attention into chunks and partitions: the same for all layers with equal heads that read the same
// keys.
#pragma once

#include <algorithm>
#include <vector>

#include "families/family.hpp"
#include "threads/thread_pool.hpp"

namespace penstock {

// Keeps its memory from step to step.
class AttentionCut {
 public:
  // Fills what depends on the batch; `args` then points into this object until the next call.
  void cut(const KvView& kv, const BatchView& batch, int heads, const KeyRule& rule, AttentionArgs& args) {
    args = {};
    args.kv = kv;
    args.batch = batch;
    args.heads = heads;
    args.rule = rule;
    make_room(args);
    const long group = heads / kv.kv_heads, tokens = std::max(1L, rows_of(args) / group);
    chunks_.clear();
    for (long s = 0; s < batch.sequences; ++s) {
      if (batch.starts[s] == batch.starts[s + 1]) continue;
      const long length = batch.positions[batch.starts[s + 1] - 1] + 1;
      for (long t = batch.starts[s]; t < batch.starts[s + 1]; t += tokens) {
        const long count = std::min<long>(tokens, batch.starts[s + 1] - t);
        const long first = rule.first_key(batch.positions[t]);
        const long end = rule.end_key(batch.positions[t + count - 1], length);
        const long first_part = first / kPartitionKeys, parts = (end - 1) / kPartitionKeys - first_part + 1;
        chunks_.push_back({s, t, count, args.part_count, parts, first_part});
        args.part_count += parts;
        args.max_rows = std::max(args.max_rows, count * group);
        args.work += static_cast<double>(count * heads) * static_cast<double>(keys_read(rule, end - 1, end - first)) *
                     static_cast<double>(kv.key_dim + kv.value_dim);
      }
    }
    args.chunks = chunks_.data();
    args.chunk_count = static_cast<long>(chunks_.size());
    // Partitions are computed apart when there are too few chunks for the threads.
    if (args.part_count > args.chunk_count && args.chunk_count * kv.kv_heads < 2 * hands()) {
      const size_t wanted =
          static_cast<size_t>(args.part_count * kv.kv_heads) * softmax_floats(args.max_rows, kv.value_dim);
      if (partial_.size() < wanted) partial_.resize(wanted);
      args.partial = partial_.data();
    }
  }

 private:
  static constexpr long kRows = 64;         // of a chunk
  static constexpr long kSparseRows = 512;  // rows that read few blocks: together they make it worth to fetch one

  static long rows_of(const AttentionArgs& args) {
    const long many = args.batch.tokens * args.heads / kSparseRows;  // chunks times key-value heads
    return args.sparse != nullptr && many >= 2 * hands() ? kSparseRows : kRows;
  }

  static long keys_read(const KeyRule& rule, long position, long seen) {
    const Sparse& sparse = rule.sparse;
    return sparse.thins(position) ? (sparse.sinks + sparse.window + sparse.chosen) * kBlockKeys : seen;
  }

  // For what sparse attention works out, if a token of the step leaves anything out.
  void make_room(AttentionArgs& args) {
    const BatchView& batch = args.batch;
    const Sparse& rule = args.rule.sparse;
    first_mean_.assign(1, 0);
    mean_pages_.clear();
    long longest = 0;
    for (long s = 0; s < batch.sequences; ++s) {
      const bool empty = batch.starts[s] == batch.starts[s + 1];
      const long last = empty ? 0 : batch.positions[batch.starts[s + 1] - 1], own = last / kBlockKeys;
      longest = std::max(longest, last);
      mean_pages_.push_back(!empty && rule.thins(last) ? (own - rule.window + 1) * (kBlockKeys / kPageTokens) : 0);
      first_mean_.push_back(first_mean_.back() + (mean_pages_.back() + kPageTokens - 1) / kPageTokens);
    }
    if (first_mean_.back() == 0) return;
    const long heads = args.kv.kv_heads, bytes = longest / kPartitionKeys + 1;
    means_.resize(std::max(means_.size(), static_cast<size_t>(first_mean_.back() * heads) * args.kv.key_cells()));
    taken_.resize(std::max(taken_.size(), static_cast<size_t>(batch.tokens * heads * bytes)));
    sparse_ = {first_mean_.data(), mean_pages_.data(), means_.data(), taken_.data(), bytes};
    args.sparse = &sparse_;
  }

  std::vector<Chunk> chunks_;
  std::vector<float> partial_;
  std::vector<long> first_mean_, mean_pages_;
  std::vector<uint32_t> means_;
  std::vector<uint8_t> taken_;
  SparseStep sparse_ = {};
};

}  // namespace penstock
