#include "moe/expert_run.hpp"

#include <algorithm>
#include <numeric>

namespace penstock {

// Slots by expert, then by token: a counting sort, whose pass over the tokens keeps their order.  Experts that are not here have
// none.
void ExpertRun::sort(const ExpertsArgs& args) {
  const auto id = [&](long row, long j) { return args.routes[row * 2 * args.top_k + j]; };
  begin_.assign(static_cast<size_t>(args.experts.count) + 1, 0);
  for (long row = 0; row < args.rows; ++row)
    for (long j = 0; j < args.top_k; ++j) begin_[id(row, j) + 1] += args.experts.has(id(row, j)) ? 1 : 0;
  std::partial_sum(begin_.begin(), begin_.end(), begin_.begin());
  const auto slots = static_cast<size_t>(args.rows * args.top_k);
  tokens_.resize(slots);
  experts_.resize(slots);
  slots_.resize(slots);
  weights_.resize(slots);
  groups_.resize(slots);
  std::vector<long>& next = rows_;
  next.assign(begin_.begin(), begin_.end() - 1);
  for (long row = 0; row < args.rows; ++row) {
    const auto* weights = reinterpret_cast<const float*>(args.routes + (row * 2 + 1) * args.top_k);
    int32_t* own = slots_.data() + row * args.top_k;
    for (long j = 0; j < args.top_k; ++j) {
      own[j] = kNoSlot;
      if (!args.experts.has(id(row, j))) continue;
      const auto slot = static_cast<size_t>(next[id(row, j)]++);
      tokens_[slot] = static_cast<int32_t>(row);
      experts_[slot] = static_cast<int32_t>(id(row, j));
      weights_[slot] = weights[j];
      groups_[slot] = static_cast<uint8_t>(group_of_expert(id(row, j), args.experts.count));
      own[j] = static_cast<int32_t>(slot);
    }
    std::sort(own, own + args.top_k);
  }
}

// out = the window's rows of x times the matrices of their experts, the first of which is `first`; with a gate what that
// makes of it, in the compute type, goes there instead.
void ExpertRun::multiply(const Matrix* weights, long first, const char* x, float* out, const Gate* gate) {
  const size_t value_bytes = compute_ == Compute::kBf16 ? 2 : 4;
  char* gated = reinterpret_cast<char*>(out);
  plain_.clear();
  compact_.clear();
  coded_.clear();
  for (const long rows : rows_) {
    const Matrix& own = weights[first++];
    if (rows == 0) continue;
    switch (own.form_for(rows)) {
      case Matrix::Form::kPlain:
        plain_.push_back({x, rows, own.layout(), out, false, nullptr, 0, {}, gate, gated});
        break;
      case Matrix::Form::kCompressed:
        compact_.push_back({x, rows, own.compressed, out, false, nullptr, 0, {}, gate, gated});
        break;
      case Matrix::Form::kQuantized:
        coded_.push_back({x, rows, own.quantized, out, false, nullptr, 0, {}, gate, gated});
        break;
    }
    x += static_cast<size_t>(rows * inputs(own)) * value_bytes;
    gated += static_cast<size_t>(rows * outputs(own) / 2) * value_bytes;
    out += rows * outputs(own);
  }
  if (!plain_.empty()) family_.linear_group({plain_.data(), static_cast<long>(plain_.size())}, compute_);
  if (!compact_.empty()) compressed_.linear_group({compact_.data(), static_cast<long>(compact_.size())});
  if (!coded_.empty()) quantized_.linear_group({coded_.data(), static_cast<long>(coded_.size())}, compute_);
}

void ExpertRun::window(const ExpertsArgs& args, long begin, long end) {
  const ExpertsView& own = args.experts;
  const long count = end - begin, first = experts_[static_cast<size_t>(begin)];
  rows_.clear();
  for (long e = first; e <= experts_[static_cast<size_t>(end - 1)]; ++e)
    rows_.push_back(std::min(end, begin_[e + 1]) - std::max(begin, begin_[e]));

  const size_t value_bytes = compute_ == Compute::kBf16 ? 2 : 4;
  char* x = room<char>(x_, count, own.inputs, value_bytes);
  char* active = room<char>(active_, count, own.inner, value_bytes);
  float* y = room<float>(y_, count, own.outputs, 4);
  const int32_t* experts = experts_.data() + begin;
  const float* weights = own.weighs_input ? weights_.data() + begin : nullptr;

  family_.gather({args.x, tokens_.data() + begin, weights, count, own.inputs, x}, compute_);
  if (own.gate_up_bias == nullptr && args.gate.fits_product(2 * own.inner)) {
    multiply(own.gate_up, first, x, reinterpret_cast<float*>(active), &args.gate);
  } else {
    float* wide = room<float>(wide_, count, 2 * own.inner, 4);
    multiply(own.gate_up, first, x, wide);
    if (own.gate_up_bias != nullptr) family_.add_bias({wide, own.gate_up_bias, experts, count, 2 * own.inner});
    family_.gated({wide, count, own.inner, args.gate, active}, compute_);
  }
  multiply(own.down, first, active, y);
  if (own.down_bias != nullptr) family_.add_bias({y, own.down_bias, experts, count, own.outputs});
  const bool apart = begin > 0 || end < begin_.back();
  float* pending = apart ? room<float>(pending_, pending_sums(args.top_k) * args.rows, own.outputs, 4) : nullptr;
  family_.combine({y, begin, end, slots_.data(), groups_.data(), own.weighs_input ? nullptr : weights_.data(), args.rows,
                   args.top_k, own.outputs, pending, args.hidden});
}

void ExpertRun::run(const ExpertsArgs& args) {
  if (args.rows == 0) return;
  sort(args);
  const long slots = begin_.back();
  for (long begin = 0; begin < slots; begin += kWindowRows) window(args, begin, std::min(slots, begin + kWindowRows));
}

}  // namespace penstock
