// How a step's attention is cut into chunks and partitions: the same for all layers with so many heads that see the same keys.
#pragma once

#include <algorithm>
#include <vector>

#include "family.hpp"
#include "pool.hpp"

namespace penstock {

// Keeps its memory from step to step.
class AttentionCut {
 public:
  // Fills what depends on the batch; `args` then points into this object until the next call.
  void cut(const KvView& kv, const BatchView& batch, int heads, const KeyRule& rule, AttentionArgs& args) {
    constexpr long kRows = 64;
    const long group = heads / kv.kv_heads, tokens = std::max(1L, kRows / group);
    args = {};
    args.kv = kv;
    args.batch = batch;
    args.heads = heads;
    args.rule = rule;
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
        args.work += static_cast<double>(count * heads) * static_cast<double>(end - first) *
                     static_cast<double>(kv.key_dim + kv.value_dim);
      }
    }
    args.chunks = chunks_.data();
    args.chunk_count = static_cast<long>(chunks_.size());
    // Partitions are computed apart when there are too few chunks for the threads.
    if (args.part_count > args.chunk_count && args.chunk_count * kv.kv_heads < 2 * hands()) {
      const long row = (kv.value_dim + 15) / 16 * 16 + 2;
      const auto wanted = static_cast<size_t>(args.part_count * kv.kv_heads * args.max_rows * row);
      if (partial_.size() < wanted) partial_.resize(wanted);
      args.partial = partial_.data();
    }
  }

 private:
  std::vector<Chunk> chunks_;
  std::vector<float> partial_;
};

}  // namespace penstock
