// The operations of a recorded step that change or make rows one by one.
#include "program/program.hpp"

#include <algorithm>
#include <cstring>

#include "program/program_checks.hpp"

namespace penstock {

int Program::positions(const Matrix& table) {
  expect(!nodes_.empty() && !finished_, "a step begins with its tokens");
  return add({.op = Op::kPositions, .in = -1, .out = -1, .matrix = table}, inputs(table), RowsOf::kTokens, false);
}

void Program::place_rows(int hidden) {
  const Slot& in = given(hidden, false, "rows are given of hidden values");
  expect(in.rows == RowsOf::kTokens && given_width_ == 0, "rows are given once, of the step's tokens");
  given_width_ = in.width;
  nodes_.push_back({.op = Op::kOther, .in = hidden, .out = hidden, .other = [=, this](const StepView& step) {
    char* to = data(hidden);
    const size_t bytes = row_bytes(slots_[static_cast<size_t>(hidden)]);
    for (long row = 0; row < step.given_count; ++row)
      std::memcpy(to + static_cast<size_t>(step.given_rows[row]) * bytes, step.given + row * given_width_, bytes);
  }});
}

int Program::features(long width) {
  expect(!finished_, "the recording is finished");
  expect(width > 0 && features_width_ == 0, "features have a width and are read once");
  features_width_ = width;
  const auto run = [=, this, out = next_slot()](const StepView& step) {
    std::memcpy(data(out), step.features, static_cast<size_t>(step.batch.tokens * width) * sizeof(float));
  };
  return add({.op = Op::kOther, .in = -1, .out = -1, .other = run}, width, RowsOf::kTokens, false);
}

void Program::tap(int hidden, long place) {
  const Slot& in = given(hidden, false, "hidden values are handed out");
  expect(in.rows == RowsOf::kTokens && place >= 0, "rows are picked out of those of all tokens");
  const long width = in.width, first = place * width;
  taps_width_ = std::max(taps_width_, first + width);
  nodes_.push_back({.op = Op::kOther, .in = hidden, .out = hidden, .other = [=, this](const StepView& step) {
    if (step.taps == nullptr) return;
    const auto* from = reinterpret_cast<const float*>(data(hidden));
    for (long row = 0; row < step.wanted_count; ++row)
      std::copy_n(from + step.wanted[row] * width, width, step.taps + row * taps_width_ + first);
  }});
}

int Program::layer_norm(int hidden, const float* weight, const float* bias, long width, float eps) {
  const Slot& in = given(hidden, false, "the norm takes hidden values");
  expect(width == in.width, "weight must be [D]");
  const Node node{.op = Op::kLayerNorm, .in = hidden, .out = -1, .vector = weight, .bias = bias, .number = eps};
  return add(node, in.width, in.rows, true);
}

void Program::layer_norm_in_place(int hidden, const float* weight, const float* bias, long width, float eps) {
  expect(given(hidden, false, "the norm takes hidden values").width == width, "weight must be [D]");
  nodes_.push_back({.op = Op::kLayerNorm, .in = -1, .out = hidden, .vector = weight, .bias = bias, .number = eps});
}

void Program::norm_add(int x, const float* weight, long width, float eps, int hidden) {
  const Slot &in = given(x, false, "the norm takes hidden values"), &to = given(hidden, false, "a sum is of hidden values");
  expect(width == in.width && to.width == in.width, "weight must be [D], x and hidden [T, D]");
  expect(in.rows == to.rows && x != hidden, "x and hidden have other rows");
  nodes_.push_back({.op = Op::kNormAdd, .in = x, .out = hidden, .vector = weight, .number = eps});
}

void Program::add_bias(int x, const float* bias, long width) {
  expect(given(x, false, "a bias is added to hidden values").width == width, "bias must be [N]");
  nodes_.push_back({.op = Op::kBias, .in = -1, .out = x, .vector = bias});
}

void Program::add(int x, int hidden) {
  const Slot &in = given(x, false, "a sum is of hidden values"), &to = given(hidden, false, "a sum is of hidden values");
  expect(in.width == to.width && in.rows == to.rows, "x and hidden must be [T, D]");
  nodes_.push_back({.op = Op::kAdd, .in = x, .out = hidden});
}

void Program::form(int x, const Form& form) {
  given(x, false, "only hidden values are changed in place");
  nodes_.push_back({.op = Op::kForm, .in = -1, .out = x, .form = form});
}

int Program::gated(int gate_up, const Gate& gate) {
  const Slot& in = given(gate_up, false, "the activation takes hidden values");
  expect(in.width % 2 == 0, "gate_up must be [T, 2 I]");
  return add({.op = Op::kGated, .in = gate_up, .out = -1, .gate = gate}, in.width / 2, in.rows, true);
}

// A product that only a gate reads, at once, stores what the gate makes of it and nothing else.
void Program::fuse_gates() {
  for (size_t n = 0; n + 1 < nodes_.size(); ++n) {
    Node& product = nodes_[n];
    const Node& gate = nodes_[n + 1];
    if (product.op != Op::kLinear || product.add || gate.op != Op::kGated || gate.in != product.out) continue;
    const auto reads = [&](const Node& node) { return node.in == product.out; };
    if (std::count_if(nodes_.begin(), nodes_.end(), reads) != 1) continue;
    if (!gate.gate.fits_product(outputs(product.matrix))) continue;
    product.out = gate.out;
    product.gate = gate.gate;
    product.gated = true;
    nodes_.erase(nodes_.begin() + static_cast<ptrdiff_t>(n) + 1);
  }
}

int Program::activate(int x, Activation activation, float alpha) {
  const Slot& in = given(x, false, "the activation takes hidden values");
  const Node node{.op = Op::kActivate, .in = x, .out = -1, .gate = {.activation = activation, .alpha = alpha}};
  return add(node, in.width, in.rows, true);
}

void Program::run_rows(const Node& node) {
  const Slot& slot = slots_[static_cast<size_t>(node.out)];
  const long rows = count(slot.rows), width = slot.width;
  const auto* in = node.in < 0 ? nullptr : reinterpret_cast<const float*>(data(node.in));
  char* out = data(node.out);
  auto* hidden = reinterpret_cast<float*>(out);
  switch (node.op) {
    case Op::kLayerNorm:
      if (in == nullptr)
        return family_.layer_norm({hidden, node.vector, node.bias, rows, width, node.number, out}, Compute::kFp32);
      return family_.layer_norm({in, node.vector, node.bias, rows, width, node.number, out}, compute_);
    case Op::kNormAdd: return family_.norm_add({in, node.vector, rows, width, node.number, hidden});
    case Op::kBias: return family_.add_bias({hidden, node.vector, nullptr, rows, width});
    case Op::kAdd: return family_.add({hidden, in, rows, width});
    case Op::kForm: return family_.form({hidden, rows, width, node.form});
    case Op::kGated: return family_.gated({in, rows, width, node.gate, out}, compute_);
    case Op::kActivate:
      return family_.activate({in, rows, width, node.gate.activation, node.gate.alpha, out}, compute_);
    default: return;
  }
}

}  // namespace penstock
