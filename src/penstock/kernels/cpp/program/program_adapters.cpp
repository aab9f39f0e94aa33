// Adapters in a recorded step.  Which adapter a row has is data of the run; a step without any skips these operations.
#include "program/program.hpp"
#include "program/program_checks.hpp"

namespace penstock {

void Program::lora_add(int x, const AdapterTable& table, long site, int out) {
  const Slot &in = given(x, true, "an adapter takes values of the compute type"),
             &to = given(out, false, "a sum is of hidden values");
  expect(site >= 0 && site < table.sites(), "no such product");
  expect(in.width == table.site(site).inputs && to.width == table.site(site).outputs, "x must be [T, K] and out [T, N]");
  expect(in.rows == to.rows && (in.rows == RowsOf::kTokens || in.rows == RowsOf::kWanted),
         "x and out have rows of tokens, or wanted ones");
  nodes_.push_back({.op = Op::kOther, .in = x, .out = out, .other = [=, this, &table, rows = in.rows](const StepView& step) {
    if (step.adapters == nullptr) return;
    const std::vector<int32_t>& slots = rows == RowsOf::kTokens ? token_adapters_ : wanted_adapters_;
    adapter_run_.run({data(x), slots.data(), count(rows), &table, site, reinterpret_cast<float*>(data(out))});
  }});
}

// The slot of every token, and of every wanted row.
void Program::place_adapters(const StepView& step) {
  if (step.adapters == nullptr) return;
  token_adapters_.resize(static_cast<size_t>(step.batch.tokens));
  wanted_adapters_.resize(static_cast<size_t>(step.wanted_count));
  for (long t = 0; t < step.batch.tokens; ++t) token_adapters_[static_cast<size_t>(t)] = step.adapters[step.sequence_of[t]];
  for (long row = 0; row < step.wanted_count; ++row)
    wanted_adapters_[static_cast<size_t>(row)] = token_adapters_[static_cast<size_t>(step.wanted[row])];
}

}  // namespace penstock
