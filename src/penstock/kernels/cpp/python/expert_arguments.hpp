// Routed experts as Python hands them over, checked once.  Included by the binding only.
#pragma once

#include <tuple>
#include <vector>

#include "moe/expert_run.hpp"
#include "python/compressed_weights.hpp"
#include "python/quantized_weights.hpp"

namespace penstock {

// Plain, compressed or quantized, for this compute type; it points into `weight`.
inline Matrix matrix_from(const nb::object& weight, int per_cell) {
  Matrix matrix;
  if (nb::isinstance<CompressedWeights>(weight)) {
    const auto& own = nb::cast<const CompressedWeights&>(weight);
    require(own.whole_blocks && per_cell == 2, "compressed weights are bf16, and segments end with a block");
    matrix.compressed = own.with_copy();
    matrix.form = Matrix::Form::kCompressed;
    return matrix;
  }
  if (nb::isinstance<QuantWeights>(weight)) {
    matrix.quantized = nb::cast<const QuantWeights&>(weight).view();
    matrix.form = Matrix::Form::kQuantized;
    return matrix;
  }
  matrix.plain = nb::cast<const Weights&>(weight).view;
  require(matrix.plain.per_cell == per_cell, "the weight was packed for the other compute type");
  return matrix;
}

// How experts are chosen, as Python says it; see Routing.
using RoutingWords = std::tuple<int, int, int, bool, int, int, bool, float>;

inline Routing routing_of(const RoutingWords& words, const float* bias) {
  const auto& [experts, top_k, score, normalized, groups, kept, pairs, factor] = words;
  require(experts > 0 && experts <= kMaxExperts, "a layer has 1 to 4096 experts");
  require(score >= 0 && score <= static_cast<int>(Score::kSoftmaxChosen), "no such score");
  require(groups > 0 && experts % groups == 0, "experts must be a multiple of groups");
  require(kept > 0 && kept <= groups && (!pairs || experts / groups > 1), "no such choice of groups");
  require(top_k > 0 && top_k <= kept * (experts / groups), "more experts are chosen than there are");
  return {experts, top_k, static_cast<Score>(score), normalized, groups, kept, pairs, factor, bias};
}

// The experts of a layer over weights that Python owns (and this object keeps alive).
struct Experts {
  std::vector<nb::object> held;
  std::vector<Matrix> gate_up, down;
  std::vector<In<float, 2>> biases;
  ExpertsView view{};
  int per_cell;

  Experts(const std::vector<nb::object>& gate_ups, const std::vector<nb::object>& downs,
          const std::optional<In<float, 2>>& gate_up_bias, const std::optional<In<float, 2>>& down_bias, int cell,
          bool weighs_input)
      : per_cell(cell) {
    require(!gate_ups.empty() && gate_ups.size() == downs.size() && gate_ups.size() <= kMaxExperts,
            "a layer has 1 to 4096 experts, each with two matrices");
    size_t known = gate_ups.size();  // an expert that is here
    for (size_t e = 0; e < gate_ups.size(); ++e) {
      require(gate_ups[e].is_none() == downs[e].is_none(), "an expert has both matrices or none");
      if (!gate_ups[e].is_none() && known == gate_ups.size()) known = e;
      gate_up.push_back(taken(gate_ups[e], gate_up, known));
      down.push_back(taken(downs[e], down, known));
    }
    require(known < gate_ups.size(), "no expert is here");
    const long wide = outputs(gate_up[known]), inner = inputs(down[known]), out = outputs(down[known]);
    require(wide == 2 * inner, "gate_up must be [2 I, K] and down [D, I]");
    const auto count = static_cast<long>(gate_up.size());
    view = {count, inputs(gate_up[known]), inner, out, gate_up.data(), down.data(), bias(gate_up_bias, count, wide),
            bias(down_bias, count, out), weighs_input};
  }

 private:
  // None is a matrix without outputs.
  Matrix taken(const nb::object& weight, const std::vector<Matrix>& before, size_t known) {
    if (weight.is_none()) return {};
    held.push_back(weight);
    const Matrix own = matrix_from(weight, per_cell);
    require(known >= before.size() || (outputs(own) == outputs(before[known]) && inputs(own) == inputs(before[known])),
            "all experts of a layer have one shape");
    return own;
  }
  const float* bias(const std::optional<In<float, 2>>& given, long count, long width) {
    if (!given) return nullptr;
    require(dim(*given, 0) == count && dim(*given, 1) == width, "a bias must be [E, N]");
    biases.push_back(*given);
    return given->data();
  }
};

}  // namespace penstock
