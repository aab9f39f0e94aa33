// The operations of a recorded step in which ranks have parts of one sum, of a norm, or of the head.
#include <algorithm>
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

void Program::norm_gathered(int x, ShmGroup& group, long first, long size, std::vector<std::vector<long>> heads,
                            const float* weight, long width, float eps) {
  const Slot& in = given(x, false, "the norm takes hidden values");
  expect(heads.size() == static_cast<size_t>(group.ranks()), "every rank has some of the heads");
  expect(size > 0 && width % size == 0, "weight must be of whole heads");
  std::vector<long> widths;
  std::vector<bool> found(static_cast<size_t>(width / size));
  for (const auto& own : heads) {
    widths.push_back(static_cast<long>(own.size()) * size);
    for (const long head : own) {
      expect(head >= 0 && head < width / size, "the norm has fewer heads");
      found[static_cast<size_t>(head)] = true;
    }
  }
  expect(std::all_of(found.begin(), found.end(), [](bool one) { return one; }), "no rank has one of the heads");
  const auto rank = static_cast<size_t>(group.rank());
  const long own = widths[rank], all = std::accumulate(widths.begin(), widths.end(), 0L);
  expect(first >= 0 && first + own <= in.width, "the heads must be columns of x");
  nodes_.push_back({.op = Op::kOther, .in = x, .out = x, .other = [=, this, &group](const StepView&) {
    const Slot& slot = slots_[static_cast<size_t>(x)];
    const long rows = count(slot.rows);
    gathered_.resize(std::max(gathered_.size(), static_cast<size_t>(rows * (own + all + width))));
    float *mine = gathered_.data(), *theirs = mine + rows * own, *whole = theirs + rows * all, *values = floats(x) + first;
    for (long row = 0; row < rows; ++row) std::copy_n(values + row * slot.width, own, mine + row * own);
    group.gather_columns(mine, rows, widths, theirs);
    for (long row = 0; row < rows; ++row)
      for (const auto& some : heads)
        for (const long head : some) {
          std::copy_n(theirs, size, whole + row * width + head * size);
          theirs += size;
        }
    family_.norm_heads({whole, rows, width, weight, width, eps, 0, 1});
    for (long row = 0; row < rows; ++row, values += slot.width)
      for (size_t place = 0; place < heads[rank].size(); ++place)
        std::copy_n(whole + row * width + heads[rank][place] * size, size, values + static_cast<long>(place) * size);
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
  head_group_->gather_columns(floats(logits_), rows, head_widths_, head_group_->rank() == 0 ? all_logits_.data() : nullptr);
}

}  // namespace penstock
