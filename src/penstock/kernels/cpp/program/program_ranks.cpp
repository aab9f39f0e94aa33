// The operations of a recorded step in which ranks have parts of one sum.
#include <cstring>

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

}  // namespace penstock
