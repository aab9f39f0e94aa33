// How one token is drawn from one row of logits.  Knows nothing about Python or threads.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "families/family.hpp"

namespace penstock {

// Below this temperature the most likely token is taken.
constexpr float kGreedyBelow = 1e-5f;

struct Ids {
  const int32_t* data = nullptr;
  long size = 0;
};

// One row of kernels/ops.py's SampleRow.
struct Draw {
  uint64_t seed = 0;
  uint32_t position = 0;
  uint32_t choice = 0;
  float temperature = 1;
  long top_k = 0;  // 0: not asked for
  float top_p = 1;
  float min_p = 0;
  float presence = 0;
  float frequency = 0;
  float repetition = 1;
  Ids output, output_counts, prompt, bias, banned;
  const float* bias_values = nullptr;
  const uint32_t* allowed = nullptr;  // bit i % 32 of word i / 32: may token i be drawn?  null: all may
  int logprobs = -1;  // alternatives to report; -1: no log-probabilities at all
};

struct Drawn {
  int32_t token = 0;
  float logprob = 0;
  std::vector<std::pair<int32_t, float>> top;
};

// Token and, when asked for, log-probabilities of the unmodified distribution.
Drawn draw(const Family& family, const float* logits, long vocabulary, const Draw& how);

// Log-probability of a given token with the `top` likeliest (ties to the lower id).
Drawn score_token(const Family& family, const float* logits, long vocabulary, int32_t token, int top);

}  // namespace penstock
