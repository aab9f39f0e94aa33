#include "program/program.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "program/program_checks.hpp"

namespace penstock {
namespace {

constexpr size_t kLine = 64;


}  // namespace

Program::Program(const Family& family, const CompressedFamily& compressed, Compute compute, const KvView& kv,
                 LayerPlaces places)
    : family_(family), compressed_(compressed), quantized_(quantized_family(family.name)), compute_(compute), kv_(kv),
      places_(std::move(places)), expert_run_(family, compressed, compute), adapter_run_(family, compute) {
  expect(kv.per_cell == (compute == Compute::kBf16 ? 2 : 1), "the KV memory holds the other compute type");
}

// --- recording ------------------------------------------------------------------------------------------------------

const Program::Slot& Program::given(int slot, bool compute, const char* what) const {
  expect(!finished_, "the recording is finished");
  expect(slot >= 0 && static_cast<size_t>(slot) < slots_.size(), "no such value");
  expect(slots_[static_cast<size_t>(slot)].compute == compute, what);
  return slots_[static_cast<size_t>(slot)];
}

int Program::add(Node node, long width, RowsOf rows, bool compute) {
  node.out = static_cast<int>(slots_.size());
  slots_.push_back({width, rows, compute});
  nodes_.push_back(node);
  return node.out;
}

int Program::embed(const Matrix& table) {
  expect(nodes_.empty(), "a step begins with one look at the table");
  return add({.op = Op::kEmbed, .in = -1, .out = -1, .matrix = table}, inputs(table), RowsOf::kTokens, false);
}

int Program::rms_norm(int hidden, const float* weight, long width, float eps) {
  const Slot& in = given(hidden, false, "the norm takes hidden values");
  expect(width == in.width, "weight must be [D]");
  return add({.op = Op::kNorm, .in = hidden, .out = -1, .vector = weight, .number = eps}, in.width, in.rows, true);
}

int Program::linear(int x, const Matrix& weight) {
  const Slot& in = given(x, true, "a linear takes values of the compute type");
  expect(in.width == inputs(weight), "x must be compute [T, K]");
  return add({.op = Op::kLinear, .in = x, .out = -1, .matrix = weight}, outputs(weight), in.rows, false);
}

void Program::linear_add(int x, const Matrix& weight, int hidden) {
  const Slot &in = given(x, true, "a linear takes values of the compute type"),
             &to = given(hidden, false, "a sum is of hidden values");
  expect(in.width == inputs(weight) && to.width == outputs(weight), "x must be [T, K] and hidden [T, N]");
  expect(in.rows == to.rows, "x and hidden have other rows");
  nodes_.push_back({.op = Op::kLinear, .in = x, .out = hidden, .matrix = weight, .add = true});
}

int Program::wanted_rows(int x) {
  expect(x >= 0 && static_cast<size_t>(x) < slots_.size(), "no such value");
  const Slot in = given(x, slots_[static_cast<size_t>(x)].compute, "");
  expect(in.rows == RowsOf::kTokens, "the wanted rows are rows of the step's tokens");
  return add({.op = Op::kWanted, .in = x, .out = -1}, in.width, RowsOf::kWanted, in.compute);
}

int Program::drawn_rows(int hidden) {
  const Slot in = given(hidden, false, "the head begins with hidden values");
  expect(in.rows == RowsOf::kWanted && hidden_ < 0, "the head begins once, with the wanted rows");
  hidden_ = hidden;
  const int slot = add({.op = Op::kDrawn, .in = hidden, .out = -1}, in.width, RowsOf::kDrawn, false);
  slots_.back().inside = hidden;
  return slot;
}

void Program::finish(int logits) {
  const Slot& last = given(logits, false, "logits are hidden values");
  expect(last.rows == RowsOf::kDrawn && hidden_ >= 0, "logits are those of drawn rows");
  logits_ = logits;
  fuse_gates();
  find_head();
  if (picks_) slots_[static_cast<size_t>(logits)].rows = RowsOf::kStored;
  drop_unused();
  assign_buffers();
  finished_ = true;
}

// Tokens can be picked when logits are a product, which may then be scaled and capped.
void Program::find_head() {
  auto node = nodes_.rbegin();
  for (; node->op == Op::kForm && node->out == logits_; ++node) {
    if (head_form_.scale != 1 || (node->form.cap != 0 && head_form_.cap != 0)) return;
    if (node->form.cap != 0) head_form_.cap = node->form.cap;
    head_form_.scale = node->form.scale;
  }
  picks_ = node->op == Op::kLinear && node->out == logits_ && !node->add;
  head_ = static_cast<int>(nodes_.rend() - node) - 1;
}

// Marks what need not be run when no rows are wanted: whatever is neither kept in pages nor read by what is.
void Program::drop_unused() {
  std::vector<bool> needed(slots_.size());
  for (auto node = nodes_.rbegin(); node != nodes_.rend(); ++node) {
    const RowsOf rows = slots_[static_cast<size_t>(node->out)].rows;
    node->always = node->writes || (rows == RowsOf::kTokens && needed[static_cast<size_t>(node->out)]);
    for (const int read : {node->in, node->also})
      if (node->always && read >= 0) needed[static_cast<size_t>(read)] = true;
  }
}

// A slot takes the widest buffer of its kind of rows that no later node reads, or a new one.
void Program::assign_buffers() {
  for (size_t n = 0; n < nodes_.size(); ++n)
    for (const int slot : {nodes_[n].in, nodes_[n].also, nodes_[n].out})
      for (int s = slot; s >= 0; s = slots_[static_cast<size_t>(s)].inside)
        slots_[static_cast<size_t>(s)].last_use = static_cast<int>(n);
  const int never = static_cast<int>(nodes_.size());
  slots_[static_cast<size_t>(hidden_)].last_use = slots_[static_cast<size_t>(logits_)].last_use = never;
  std::vector<int> busy_until;  // of each buffer: the last node that reads it
  std::vector<RowsOf> kind;
  for (size_t n = 0; n < nodes_.size(); ++n) {
    Slot& slot = slots_[static_cast<size_t>(nodes_[n].out)];
    if (slot.buffer >= 0 || slot.inside >= 0) continue;
    int best = -1;
    for (size_t b = 0; b < busy_until.size(); ++b)
      if (busy_until[b] < static_cast<int>(n) && kind[b] == slot.rows &&
          (best < 0 || widths_[b] > widths_[static_cast<size_t>(best)]))
        best = static_cast<int>(b);
    if (best < 0) {
      best = static_cast<int>(busy_until.size());
      busy_until.push_back(0);
      kind.push_back(slot.rows);
      widths_.push_back(0);
      users_.emplace_back();
    }
    const auto own = static_cast<size_t>(best);
    slot.buffer = best;
    busy_until[own] = slot.last_use;
    widths_[own] = std::max(widths_[own], static_cast<long>(row_bytes(slot)));
    users_[own].push_back(nodes_[n].out);
  }
  offsets_.resize(widths_.size());
}

// --- running --------------------------------------------------------------------------------------------------------

char* Program::data(int index) const {
  const Slot& slot = slots_[static_cast<size_t>(index)];
  if (slot.inside < 0) return base_ + offsets_[static_cast<size_t>(slot.buffer)];
  const long before = count(RowsOf::kWanted) - count(RowsOf::kDrawn);
  return data(slot.inside) + static_cast<size_t>(before) * row_bytes(slot);
}

void Program::place(const StepView& step) {
  counts_[static_cast<int>(RowsOf::kTokens)] = step.batch.tokens;
  counts_[static_cast<int>(RowsOf::kWanted)] = step.wanted_count;
  counts_[static_cast<int>(RowsOf::kDrawn)] = step.wanted_count - step.scored;
  counts_[static_cast<int>(RowsOf::kStored)] = step.wanted_count - step.scored - (picks_ ? step.picked : 0);
  size_t end = 0;
  for (size_t b = 0; b < widths_.size(); ++b) {
    const RowsOf rows = slots_[static_cast<size_t>(users_[b].front())].rows;
    offsets_[b] = end;
    end += (static_cast<size_t>(widths_[b]) * static_cast<size_t>(count(rows)) + kLine - 1) / kLine * kLine + kLine;
  }
  base_ = arena_.reserve(end);
  for (Cut& cut : cuts_) cut.made = false;
  place_adapters(step);
}

void Program::run(const StepView& step) {
  expect(finished_, "the recording is not finished");
  place(step);
  if (head_group_ != nullptr)
    for (long i = 0; i < step.picked; ++i) step.picks[i].first = static_cast<int32_t>(head_first());
  for (const Node& node : nodes_) {
    const bool any = picks_ && &node == &nodes_[static_cast<size_t>(head_)]
                         ? count(RowsOf::kDrawn) > 0
                         : count(slots_[static_cast<size_t>(node.out)].rows) > 0;
    if (any && (node.always || step.wanted_count > 0)) run_node(node, step);
  }
  if (head_group_ != nullptr) exchange_head(step);
}

void Program::run_node(const Node& node, const StepView& step) {
  const Slot& out = slots_[static_cast<size_t>(node.out)];
  const long rows = count(out.rows);
  switch (node.op) {
    case Op::kEmbed: return run_lookup(node, step.tokens);
    case Op::kPositions: return run_lookup(node, step.batch.positions);
    case Op::kNorm: {
      const auto* hidden = reinterpret_cast<const float*>(data(node.in));
      family_.rms_norm({hidden, node.vector, rows, out.width, node.number, data(node.out)}, compute_);
      return;
    }
    case Op::kLinear: return run_linear(node, step);
    case Op::kWanted: return gather(node, step);
    case Op::kDrawn: return;  // a part of its input
    case Op::kRoute:
    case Op::kExperts: return run_experts(node);
    case Op::kOther: return node.other(step);
    default: return run_rows(node);
  }
}

void Program::run_lookup(const Node& node, const int32_t* ids) {
  const long rows = count(slots_[static_cast<size_t>(node.out)].rows);
  auto* out = reinterpret_cast<float*>(data(node.out));
  switch (node.matrix.form) {
    case Matrix::Form::kPlain: return family_.embed({node.matrix.plain, ids, rows, out}, compute_);
    case Matrix::Form::kCompressed: return compressed_.embed({node.matrix.compressed, ids, rows, out});
    case Matrix::Form::kQuantized: return quantized_.embed({node.matrix.quantized, ids, rows, out});
  }
}

void Program::run_linear(const Node& node, const StepView& step) {
  const bool head = picks_ && &node == &nodes_[static_cast<size_t>(head_)];
  const long rows = count(slots_[static_cast<size_t>(node.in)].rows);
  const void* x = data(node.in);
  auto* out = reinterpret_cast<float*>(data(node.out));
  Pick* picks = head && step.picked > 0 ? step.picks : nullptr;
  const Gate* gate = node.gated ? &node.gate : nullptr;
  void* gated = node.gated ? data(node.out) : nullptr;
  const long stored = count(RowsOf::kStored);
  const Matrix& w = node.matrix;
  switch (w.form_for(rows)) {
    case Matrix::Form::kPlain:
      return family_.linear({x, rows, w.layout(), out, node.add, picks, stored, head_form_, gate, gated}, compute_);
    case Matrix::Form::kCompressed:
      return compressed_.linear({x, rows, w.compressed, out, node.add, picks, stored, head_form_, gate, gated});
    case Matrix::Form::kQuantized:
      return quantized_.linear({x, rows, w.quantized, out, node.add, picks, stored, head_form_, gate, gated}, compute_);
  }
}

void Program::gather(const Node& node, const StepView& step) {
  const size_t bytes = row_bytes(slots_[static_cast<size_t>(node.out)]);
  const char* from = data(node.in);
  char* to = data(node.out);
  for (long row = 0; row < step.wanted_count; ++row, to += bytes) std::memcpy(to, from + step.wanted[row] * bytes, bytes);
}

}  // namespace penstock
