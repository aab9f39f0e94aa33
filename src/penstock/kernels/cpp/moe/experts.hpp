// Routed experts, row by row: which experts a token goes to, and the sum of what they make of it.
#pragma once

#include "moe/routing.hpp"
#include "rows/elementwise.hpp"
#include "sampling/sampling.hpp"

namespace {

constexpr float kNothing = -__builtin_inff();

// fn(sixteen values, first column) of x into `to`.
template <class Fn>
PS_INLINE void each_value(const float* x, long n, float* to, const Fn& fn) {
  for (long i = 0; i < n; i += 16) {
    const int count = static_cast<int>(min_of(16, n - i));
    store_part(to + i, fn(load_part<F16>(x + i, count), i, count), count);
  }
}

PS_INLINE void scores_of(const Routing& how, const float* logits, float* scores) {
  const F16 one = splat(1.0f), zero = splat(0.0f);
  if (how.score == Score::kSigmoid) {
    each_value(logits, how.experts, scores, [&](const F16& v, long, int) { return one / (one + exp16(zero - v)); });
    return;
  }
  const float top = argmax(logits, how.experts).value;
  const F16 shift = splat(top), sum = splat(sum_exp(logits, how.experts, top));
  each_value(logits, how.experts, scores, [&](const F16& v, long, int) { return exp16(v - shift) / sum; });
}

// Experts of all but the best groups cannot be chosen; of equal groups the lower is better.
void drop_groups(const Routing& how, float* choice, float* best) {
  const long size = how.experts / how.groups;
  for (long g = 0; g < how.groups; ++g) {
    const float* own = choice + g * size;
    const Best first = argmax(own, size);
    best[g] = first.value;
    if (!how.pairs) continue;
    float second = kNothing;
    for (long i = 0; i < size; ++i)
      if (i != first.id && own[i] > second) second = own[i];
    best[g] += second;
  }
  for (int kept = 0; kept < how.groups_kept; ++kept) best[argmax(best, how.groups).id] = kNothing;
  for (long g = 0; g < how.groups; ++g) {
    if (best[g] == kNothing) continue;
    for (long i = g * size; i < (g + 1) * size; ++i) choice[i] = kNothing;
  }
}

// Weights of the chosen, best first.
void weigh(const Routing& how, const float* logits, const float* scores, const uint32_t* ids, float* weights) {
  const float* from = how.score == Score::kSoftmaxChosen ? logits : scores;
  for (int i = 0; i < how.top_k; ++i) weights[i] = from[ids[i]];
  if (how.score == Score::kSoftmaxChosen) {
    const F16 shift = splat(argmax(weights, how.top_k).value);
    each_value(weights, how.top_k, weights, [&](const F16& v, long, int) { return exp16(v - shift); });
  }
  if (how.normalized || how.score == Score::kSoftmaxChosen) {
    float sum = 1e-20f;
    for (int i = 0; i < how.top_k; ++i) sum += weights[i];
    for (int i = 0; i < how.top_k; ++i) weights[i] /= sum;
  }
  for (int i = 0; i < how.top_k; ++i) weights[i] *= how.factor;
}

void route_rows(const RouteArgs& args) {
  const Routing& how = args.how;
  const long experts = how.experts, room = (experts + 15) / 16 * 16;
  const double work = static_cast<double>(args.rows) * static_cast<double>(experts * (12 + how.top_k));
  each_row(args.rows, experts * 8, work, [&](long row, int worker) {
    const float* logits = args.logits + row * experts;
    float* scores = static_cast<float*>(workspace(worker, static_cast<size_t>(3 * room) * 4));
    float *choice = scores + room, *best = choice + room;
    if (how.score != Score::kSoftmaxChosen) scores_of(how, logits, scores);
    // Scores order experts as logits do, but for those that rounding made equal.
    const float* by = how.bias != nullptr || how.pairs ? scores : logits;
    each_value(by, experts, choice, [&](const F16& v, long i, int count) {
      return how.bias != nullptr ? v + load_part<F16>(how.bias + i, count) : v;
    });
    if (how.groups > 1) drop_groups(how, choice, best);
    uint32_t* ids = args.routes + row * how.words();
    for (int i = 0; i < how.top_k; ++i) {
      const int32_t id = argmax(choice, experts).id;
      ids[i] = static_cast<uint32_t>(id);
      choice[id] = kNothing;
    }
    weigh(how, logits, scores, ids, reinterpret_cast<float*>(ids + how.top_k));
  });
}

PS_INLINE F16 load_values(const float* from, int count) { return load_part<F16>(from, count); }
PS_INLINE F16 load_values(const uint16_t* from, int count) {
  alignas(64) uint32_t wide[16] = {};
  for (int i = 0; i < count; ++i) wide[i] = static_cast<uint32_t>(from[i]) << 16;
  return load_as<F16>(wide);
}

template <class D>
void gather_typed(const GatherArgs& args) {
  using Value = typename D::Value;
  const double work = static_cast<double>(args.count) * static_cast<double>(args.width);
  each_row(args.count, args.width, work, [&](long row, int) {
    const Value* from = static_cast<const Value*>(args.x) + args.rows[row] * args.width;
    Value* to = static_cast<Value*>(args.out) + row * args.width;
    if (args.weights == nullptr) {
      __builtin_memcpy(to, from, static_cast<size_t>(args.width) * sizeof(Value));
      return;
    }
    const F16 weight = splat(args.weights[row]);
    for (long i = 0; i < args.width; i += 16) {
      const int count = static_cast<int>(min_of(16, args.width - i));
      store_values<D>(to + i, load_values(from + i, count) * weight, count);
    }
  });
}

// The sums of one token that wait for others, those of the lowest groups first; each joins the one before it as soon as
// no group can come that belongs below either.  They lie wherever the caller says.
struct PendingGroups {
  int count = 0;
  uint8_t group[kPendingSums] = {};  // one of those in each sum

  // Joins, by `join` (index of the right one), what ends before `next`.
  template <class Join>
  PS_INLINE void join_before(int next, const Join& join) {
    // Of two groups the highest bit in which they differ is the size of the smallest subtree with both.
    while (count > 1 && (group[count - 2] ^ group[count - 1]) < (group[count - 1] ^ next)) join(--count);
  }

  // Makes `next` the last group; was it that already?
  template <class Join>
  PS_INLINE bool reach(int next, const Join& join) {
    if (count > 0 && group[count - 1] == next) return true;
    join_before(next, join);
    group[count++] = static_cast<uint8_t>(next);
    return false;
  }
};

constexpr long kSumColumns = 128;  // that are summed at a time: their pending sums stay in the first-level cache

// Some columns of one token.
struct TokenSum {
  const CombineArgs& args;
  long first, count;  // columns
  float* pending;     // [kPendingSums], `apart` numbers from one to the next
  long apart;

  template <class Fn>
  PS_INLINE void each_sixteen(const Fn& fn) const {
    for (long i = 0; i < count; i += 16) fn(i, static_cast<int>(min_of(16, count - i)));
  }

  PS_INLINE void join(int right) const {
    const float* from = pending + right * apart;
    float* to = pending + (right - 1) * apart;
    each_sixteen([&](long i, int n) { store_part(to + i, load_part<F16>(to + i, n) + load_part<F16>(from + i, n), n); });
  }

  PS_INLINE void add_slot(long slot, int place, bool more) const {
    const float* from = args.y + (slot - args.begin) * args.width + first;
    float* to = pending + place * apart;
    const F16 weight = splat(args.weights != nullptr ? args.weights[slot] : 1.0f);
    each_sixteen([&](long i, int n) {
      const F16 y = load_part<F16>(from + i, n), sum = more ? load_part<F16>(to + i, n) : splat(0.0f);
      store_part(to + i, args.weights != nullptr ? fma16(y, weight, sum) : sum + y, n);
    });
  }

  // No negative zero remains, so it makes no difference whether what is not there was skipped or added as zeros.
  PS_INLINE void finish(float* hidden) const {
    each_sixteen([&](long i, int n) {
      const F16 sum = load_part<F16>(pending + i, n) + splat(0.0f);
      store_part(hidden + first + i, load_part<F16>(hidden + first + i, n) + sum, n);
    });
  }
};

void combine_rows(const CombineArgs& args) {
  const double work = static_cast<double>(args.end - args.begin) * static_cast<double>(args.width);
  each_row(args.rows, args.width * args.top_k, work, [&](long row, int) {
    const int32_t* slots = args.slots + row * args.top_k;
    long last = args.top_k;  // slots of experts that are here
    while (last > 0 && slots[last - 1] == kNoSlot) --last;
    long from = 0, to = last;
    while (from < to && slots[from] < args.begin) ++from;
    while (to > from && slots[to - 1] >= args.end) --to;
    if (from == to) return;
    PendingGroups before;
    for (long j = 0; j < from; ++j) before.reach(args.groups[slots[j]], [](int) {});
    const bool all = to - from == last;
    alignas(64) float local[kPendingSums * kSumColumns];
    for (long i = 0; i < args.width; i += kSumColumns) {
      const TokenSum sum{args, i, min_of(kSumColumns, args.width - i), all ? local : args.pending + row * args.width + i,
                         all ? kSumColumns : args.rows * args.width};
      const auto join = [&](int right) { sum.join(right); };
      PendingGroups groups = before;
      for (long j = from; j < to; ++j) {
        const bool more = groups.reach(args.groups[slots[j]], join);
        sum.add_slot(slots[j], groups.count - 1, more);
      }
      if (to < last) continue;
      groups.join_before(kExpertGroups, join);
      sum.finish(args.hidden + row * args.width);
    }
  });
}

}  // namespace
