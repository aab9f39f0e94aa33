// The operations of a recorded step in which ranks have parts of one sum, or of the head.
#include <cstring>
#include <numeric>

#include "collectives/shm_group.hpp"
#include "program/program.hpp"
#include "program/program_checks.hpp"

namespace penstock {

int Program::zeros(int like, long width) {
  expect(like >= 0 && static_cast<size_t>(like) < slots_.size() && width > 0, "zeros have the rows of another value");
  const auto run = [=, this, out = next_slot()](const StepView&) {
    const Slot& slot = slots_[static_cast<size_t>(out)];
    std::memset(data(out), 0, row_bytes(slot) * static_cast<size_t>(count(slot.rows)));
  };
  return add({.op = Op::kOther, .in = like, .out = -1, .other = run}, width, slots_[static_cast<size_t>(like)].rows, false);
}

void Program::all_reduce(int x, ShmGroup& group) {
  given(x, false, "ranks add up hidden values");
  nodes_.push_back({.op = Op::kOther, .in = x, .out = x, .other = [=, this, &group](const StepView&) {
    const Slot& slot = slots_[static_cast<size_t>(x)];
    const long rows = count(slot.rows);
    group.all_reduce(floats(x), static_cast<size_t>(rows * slot.width), static_cast<uint32_t>(rows));
  }});
}

void Program::finish_part(int logits, ShmGroup& group, std::vector<long> widths) {
  expect(widths.size() == static_cast<size_t>(group.ranks()), "every rank has a part of the head");
  expect(given(logits, false, "logits are hidden values").width == widths[static_cast<size_t>(group.rank())],
         "this rank has another number of the head's rows");
  finish(logits);
  head_group_ = &group;
  head_widths_ = std::move(widths);
}

long Program::head_first() const {
  return std::accumulate(head_widths_.begin(), head_widths_.begin() + head_group_->rank(), 0L);
}

void Program::exchange_head(const StepView& step) {
  const long rows = stored();
  if (picks_ && step.picked > 0) {
    bests_.resize(static_cast<size_t>(step.picked));
    for (size_t i = 0; i < bests_.size(); ++i) bests_[i] = step.picks[i].best;
    head_group_->all_reduce_max(bests_.data(), bests_.size());
    for (size_t i = 0; i < bests_.size(); ++i) step.picks[i].best = bests_[i];
  }
  if (rows == 0) return;
  if (head_group_->rank() == 0) all_logits_.resize(static_cast<size_t>(rows * vocabulary()));
  head_group_->gather_columns(floats(logits_), rows, head_widths_, all_logits_.data());
}

}  // namespace penstock
