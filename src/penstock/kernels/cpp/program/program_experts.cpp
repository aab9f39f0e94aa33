// Routed experts in a recorded step.  Which experts a row goes to is data of the run: routes are words of a slot.
#include "program/program.hpp"
#include "program/program_checks.hpp"

namespace penstock {

int Program::route(int logits, const Routing& how) {
  const Slot& in = given(logits, false, "routing takes hidden values");
  expect(in.width == how.experts, "logits must be [T, E]");
  const int slot = add({.op = Op::kRoute, .in = logits, .out = -1, .routing = how}, how.words(), in.rows, false);
  slots_.back().chosen = how.experts;
  return slot;
}

void Program::experts_add(int x, int routes, const ExpertsView& experts, const Gate& gate, int hidden) {
  const Slot &in = given(x, true, "experts take values of the compute type"),
             &way = given(routes, false, "routes are those of a recorded choice"),
             &to = given(hidden, false, "a sum is of hidden values");
  expect(in.width == experts.inputs && to.width == experts.outputs, "x must be [T, K] and hidden [T, D]");
  expect(way.chosen == experts.count, "the routes choose among another number of experts");
  expect(in.rows == to.rows && in.rows == way.rows, "x, routes and hidden have other rows");
  nodes_.push_back({.op = Op::kExperts, .in = x, .out = hidden, .also = routes, .gate = gate, .experts = experts});
}

void Program::run_experts(const Node& node) {
  const long rows = count(slots_[static_cast<size_t>(node.out)].rows);
  if (node.op == Op::kRoute) {
    const auto* logits = reinterpret_cast<const float*>(data(node.in));
    return family_.route({logits, rows, node.routing, reinterpret_cast<uint32_t*>(data(node.out))});
  }
  const auto* routes = reinterpret_cast<const uint32_t*>(data(node.also));
  const long top_k = slots_[static_cast<size_t>(node.also)].width / 2;
  expert_run_.run({data(node.in), routes, rows, top_k, node.experts, node.gate,
                   reinterpret_cast<float*>(data(node.out))});
}

}  // namespace penstock
