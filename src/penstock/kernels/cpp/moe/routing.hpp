// What the kernels of routed experts are given (kernels/ops.py: route, experts_add).
#pragma once

#include "families/family.hpp"

namespace penstock {

constexpr int kMaxExperts = 4096;
constexpr int kExpertGroups = 64;  // leaves of the tree by which a token's experts are summed (kernels/sum_tree.py)

// Group i ends at floor((i + 1) * experts / 64); of fewer experts than groups each has one, and some are empty.
PS_EVERYWHERE int group_of_expert(long expert, long experts) {
  return static_cast<int>(((expert + 1) * kExpertGroups - 1) / experts);
}

constexpr int32_t kNoSlot = 0x7FFFFFFF;  // of an expert that another rank has

enum class Score : int { kSoftmax = 0, kSigmoid = 1, kSoftmaxChosen = 2 };

// How experts are chosen, in the words of kernels/operands.py's Routing.
struct Routing {
  int experts;
  int top_k;
  Score score;
  bool normalized;  // weights of a token sum up to `factor`
  int groups;
  int groups_kept;
  bool pairs;  // a group is as good as its best two together, else as its best
  float factor;
  const float* bias;  // [experts], added to scores for the choice only; may be null

  PS_EVERYWHERE long words() const { return 2L * top_k; }  // of a row of routes
};

// A row of routes: ids of the chosen experts, best first, then their weights as fp32.
struct RouteArgs {
  const float* logits;  // [rows, experts]
  long rows;
  Routing how;
  uint32_t* routes;  // [rows, 2 * top_k]
};

struct GatherArgs {
  const void* x;  // [.., width]
  const int32_t* rows;  // [count]
  const float* weights;  // [count]: each row is multiplied by its weight and rounded again; null: copied
  long count;
  long width;
  void* out;  // [count, width]
};

// Sums of one token that wait for their right neighbors in the tree, at most: one of each size of a subtree, 32, 16, ...
// 1 groups, and that of the present group.
constexpr int kPendingSums = 7;

// The same for tokens of `top_k` experts.
PS_EVERYWHERE long pending_sums(long top_k) { return top_k < kPendingSums ? top_k : kPendingSums; }

// Adds up what experts made of each token.  Slots are (expert, token) pairs in this order; `y` holds slots
// [begin, end).  A token's slots are summed from the first to the last within each group of experts, and groups by the
// tree; of a pair of neighbors without slots on one side the other side is the sum.
struct CombineArgs {
  const float* y;  // [end - begin, width]
  long begin;
  long end;
  const int32_t* slots;   // [rows, top_k], ascending in a row; last come those of experts that are not here: kNoSlot
  const uint8_t* groups;  // of each slot
  const float* weights;   // of each slot; null: all are 1
  long rows;
  long top_k;
  long width;
  float* pending;  // [pending_sums(top_k), rows, width]: of tokens whose slots are not all in one call; null: there are none
  float* hidden;   // [rows, width], receives finished sums
};

}  // namespace penstock
