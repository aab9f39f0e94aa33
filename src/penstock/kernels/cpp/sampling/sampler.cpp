#include "sampling/sampler.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace penstock {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Descending by value, ties to the lower id.
struct Ranked {
  float value;
  int32_t id;
  bool operator<(const Ranked& other) const {
    return value > other.value || (value == other.value && id < other.id);
  }
};

bool changes_logits(const Draw& how) {
  const bool penalised = how.presence != 0 || how.frequency != 0;
  return how.allowed != nullptr || how.bias.size > 0 || how.banned.size > 0 || (penalised && how.output.size > 0) ||
         (how.repetition != 1 && how.output.size + how.prompt.size > 0);
}

void penalise_repetition(const Draw& how, std::vector<float>& x) {
  std::vector<bool> seen(x.size());
  for (const Ids& ids : {how.output, how.prompt})
    for (long i = 0; i < ids.size; ++i) {
      const auto id = static_cast<size_t>(ids.data[i]);
      if (seen[id]) continue;
      seen[id] = true;
      x[id] = x[id] > 0 ? x[id] / how.repetition : x[id] * how.repetition;
    }
}

void keep_allowed(const uint32_t* allowed, std::vector<float>& x) {
  for (size_t begin = 0; begin < x.size(); begin += 32) {
    const uint32_t word = allowed[begin / 32];
    if (word == ~uint32_t{0}) continue;
    const size_t count = std::min<size_t>(32, x.size() - begin);
    for (size_t i = 0; i < count; ++i) x[begin + i] = (word >> i & 1) != 0 ? x[begin + i] : -kInfinity;
  }
}

// logit_bias, repetition, frequency, presence, bans, mask: in vLLM's order.
void adjust(const Draw& how, std::vector<float>& x) {
  for (long i = 0; i < how.bias.size; ++i) x[static_cast<size_t>(how.bias.data[i])] += how.bias_values[i];
  if (how.repetition != 1) penalise_repetition(how, x);
  if (how.frequency != 0 || how.presence != 0)
    for (long i = 0; i < how.output.size; ++i) {
      float& value = x[static_cast<size_t>(how.output.data[i])];
      value -= how.frequency * static_cast<float>(how.output_counts.data[i]);
      value -= how.output_counts.data[i] > 0 ? how.presence : 0.0f;
    }
  for (long i = 0; i < how.banned.size; ++i) x[static_cast<size_t>(how.banned.data[i])] = -kInfinity;
  if (how.allowed != nullptr) keep_allowed(how.allowed, x);
}

// The values at or above `floor`, unsorted.
std::vector<Ranked> candidates(const Family& family, const float* x, long n, float floor) {
  std::vector<int32_t> ids(static_cast<size_t>(n));
  const long count = family.collect(x, n, floor, ids.data());
  std::vector<Ranked> found(static_cast<size_t>(count));
  for (size_t i = 0; i < found.size(); ++i) found[i] = {x[ids[i]], ids[i]};
  return found;
}

// Windows below the largest value, each tried when the one before did not hold enough.
constexpr float kWindows[] = {4, 10, 20, 40, kInfinity};

std::vector<Ranked> largest(const Family& family, const float* x, long n, float top, long count) {
  for (const float window : kWindows) {
    std::vector<Ranked> found = candidates(family, x, n, top - window);
    if (static_cast<long>(found.size()) < count && window != kInfinity) continue;
    const auto wanted = std::min(found.size(), static_cast<size_t>(count));
    std::partial_sort(found.begin(), found.begin() + static_cast<std::ptrdiff_t>(wanted), found.end());
    found.resize(wanted);
    return found;
  }
  return {};
}

// Keeps the likeliest of sorted candidates while those before hold less than `mass` of e^(x - top).  False when the
// candidates end before that and others might follow.
bool keep_mass(const Family& family, std::vector<Ranked>& sorted, float top, double mass) {
  std::vector<float> values(sorted.size()), weights(sorted.size());
  for (size_t i = 0; i < sorted.size(); ++i) values[i] = sorted[i].value;
  family.exp_minus(values.data(), static_cast<long>(values.size()), top, weights.data());
  double before = 0;
  for (size_t i = 0; i < sorted.size(); ++i) {
    if (i > 0 && before >= mass) {
      sorted.resize(i);
      return true;
    }
    before += static_cast<double>(weights[i]);
  }
  return before >= mass;
}

std::vector<Ranked> nucleus(const Family& family, const float* x, long n, const Draw& how, float top) {
  if (how.top_k > 0 && how.top_k < n) {
    std::vector<Ranked> kept = largest(family, x, n, top, how.top_k);
    if (how.top_p < 1) {
      std::vector<float> values(kept.size()), weights(kept.size());
      for (size_t i = 0; i < kept.size(); ++i) values[i] = kept[i].value;
      family.exp_minus(values.data(), static_cast<long>(values.size()), top, weights.data());
      double total = 0;
      for (const float weight : weights) total += static_cast<double>(weight);
      keep_mass(family, kept, top, static_cast<double>(how.top_p) * total);
    }
    return kept;
  }
  const double mass = static_cast<double>(how.top_p) * static_cast<double>(family.sum_exp(x, n, top));
  for (const float window : kWindows) {
    std::vector<Ranked> kept = candidates(family, x, n, top - window);
    std::sort(kept.begin(), kept.end());
    if (keep_mass(family, kept, top, mass) || window == kInfinity) return kept;
  }
  return {};
}

DrawKey key_of(const Draw& how) {
  return {static_cast<uint32_t>(how.seed), static_cast<uint32_t>(how.seed >> 32), how.position, how.choice};
}

int32_t draw_from(const Family& family, const std::vector<Ranked>& kept, const DrawKey& key, float floor) {
  std::vector<int32_t> ids(kept.size());
  std::vector<float> noise(kept.size());
  for (size_t i = 0; i < kept.size(); ++i) ids[i] = kept[i].id;
  family.gumbel(key, ids.data(), static_cast<long>(ids.size()), noise.data());
  Ranked best{-kInfinity, kept.front().id};
  for (size_t i = 0; i < kept.size(); ++i) {
    const Ranked drawn{kept[i].value + noise[i], kept[i].id};
    if (kept[i].value >= floor && drawn < best) best = drawn;
  }
  return best.id;
}

int32_t draw_token(const Family& family, const float* logits, long n, const Draw& how) {
  std::vector<float> own;
  const float* x = logits;
  if (changes_logits(how)) {
    own.assign(logits, logits + n);
    adjust(how, own);
    x = own.data();
  }
  if (how.temperature < kGreedyBelow) return family.argmax(x, n).id;
  if (how.temperature != 1) {
    own.resize(static_cast<size_t>(n));
    family.divide(x, n, how.temperature, own.data());
    x = own.data();
  }
  const Best top = family.argmax(x, n);
  if (!std::isfinite(top.value)) return top.id;
  const float floor = how.min_p > 0 ? top.value + family.log(how.min_p) : -std::numeric_limits<float>::max();
  const bool all = (how.top_k <= 0 || how.top_k >= n) && how.top_p >= 1;
  if (all) return family.gumbel_argmax(key_of(how), x, n, floor, top).id;
  return draw_from(family, nucleus(family, x, n, how, top.value), key_of(how), floor);
}

void add_logprobs(const Family& family, const float* logits, long n, int count, Drawn& drawn) {
  const float top = family.argmax(logits, n).value;
  const float shift = top + family.log(family.sum_exp(logits, n, top));
  drawn.logprob = logits[drawn.token] - shift;
  if (count > 0)
    for (const Ranked& ranked : largest(family, logits, n, top, count))
      drawn.top.emplace_back(ranked.id, ranked.value - shift);
}

}  // namespace

Drawn draw(const Family& family, const float* logits, long vocabulary, const Draw& how) {
  Drawn drawn;
  drawn.token = draw_token(family, logits, vocabulary, how);
  if (how.logprobs >= 0) add_logprobs(family, logits, vocabulary, how.logprobs, drawn);
  return drawn;
}

Drawn score_token(const Family& family, const float* logits, long vocabulary, int32_t token, int top) {
  Drawn drawn;
  drawn.token = token;
  add_logprobs(family, logits, vocabulary, top, drawn);
  return drawn;
}

}  // namespace penstock
