// Recorded steps: the operations of recurrent layers.
#include "program/program.hpp"
#include "program/program_checks.hpp"

namespace penstock {

void Program::keep(const StatesView& states) { states_ = states; }

int Program::causal_conv(int x, const float* weight, long taps, long channels, long layer) {
  const Slot& in = given(x, false, "the convolution takes hidden values");
  expect(layer >= 0 && layer < states_.layers, "the KV memory keeps no state of this layer");
  expect(in.rows == RowsOf::kTokens && in.width >= states_.channels(), "x must be [T, N] with all channels");
  expect(taps == states_.taps && channels == states_.channels(), "weight must be [K, C]");
  const auto run = [=, this, out = next_slot()](const StepView& step) {
    family_.causal_conv({floats(x), slots_[static_cast<size_t>(x)].width, weight, state_step(step, layer), floats(out)});
  };
  return add({.op = Op::kOther, .in = x, .out = -1, .writes = true, .other = run}, channels, RowsOf::kTokens, false);
}

int Program::delta_rule(int qkv, int gates, long beta, long decay, const float* rates, const float* shifts, long layer) {
  const Slot &in = given(qkv, false, "the delta rule takes hidden values"),
             &by = given(gates, false, "gates are hidden values");
  expect(layer >= 0 && layer < states_.layers, "the KV memory keeps no state of this layer");
  expect(in.rows == RowsOf::kTokens && in.width == states_.channels(), "qkv must be [T, C]");
  expect(by.rows == RowsOf::kTokens && beta >= 0 && decay >= 0 && beta + states_.heads <= by.width &&
             decay + states_.heads <= by.width,
         "the gates of all heads must be columns");
  const auto run = [=, this, out = next_slot()](const StepView& step) {
    family_.delta_rule({floats(qkv), floats(gates), slots_[static_cast<size_t>(gates)].width, beta, decay, rates, shifts,
                        state_step(step, layer), floats(out)});
  };
  return add({.op = Op::kOther, .in = qkv, .out = -1, .also = gates, .writes = true, .other = run},
             states_.heads * states_.value_dim, RowsOf::kTokens, false);
}

int Program::gated_norm(int x, int gate, long first, const float* weight, long group, float eps) {
  const Slot &in = given(x, false, "the norm takes hidden values"), &by = given(gate, false, "gates are hidden values");
  expect(group > 0 && in.width % group == 0, "columns of x must be whole groups");
  expect(in.rows == by.rows && first >= 0 && first + in.width <= by.width, "a gate for every column of x");
  const auto run = [=, this, rows = in.rows, width = in.width, out = next_slot()](const StepView&) {
    family_.gated_norm({floats(x), count(rows), width, floats(gate), slots_[static_cast<size_t>(gate)].width, first,
                        weight, group, eps, data(out)},
                       compute_);
  };
  return add({.op = Op::kOther, .in = x, .out = -1, .also = gate, .other = run}, in.width, in.rows, true);
}

int Program::sigmoid_gated(int x, int gate) {
  const Slot &in = given(x, true, "what is gated is of the compute type"),
             &by = given(gate, false, "gates are hidden values");
  expect(in.rows == by.rows && in.width == by.width, "x and its gate must be [T, N]");
  const auto run = [=, this, rows = in.rows, width = in.width, out = next_slot()](const StepView&) {
    family_.sigmoid_gated({data(x), floats(gate), count(rows), width, data(out)}, compute_);
  };
  return add({.op = Op::kOther, .in = x, .out = -1, .also = gate, .other = run}, in.width, in.rows, true);
}

void Program::gated_add(int x, int gate, int hidden) {
  const Slot &in = given(x, false, "a sum is of hidden values"), &by = given(gate, false, "gates are hidden values"),
             &to = given(hidden, false, "a sum is of hidden values");
  expect(in.width == to.width && in.rows == to.rows && x != hidden, "x and hidden must be [T, D]");
  expect(by.rows == in.rows && by.width == 1, "a gate for every row");
  const auto run = [=, this, rows = in.rows, width = in.width](const StepView&) {
    family_.gated_add({floats(hidden), floats(x), floats(gate), count(rows), width});
  };
  nodes_.push_back({.op = Op::kOther, .in = x, .out = hidden, .also = gate, .other = run});
}

StateStep Program::state_step(const StepView& step, long layer) const {
  return {states_, step.states, step.batch, layer};
}

}  // namespace penstock
