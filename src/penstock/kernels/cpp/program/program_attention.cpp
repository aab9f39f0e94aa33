// Recorded steps: the operations around attention.
#include "program/program.hpp"
#include "program/program_checks.hpp"

namespace penstock {

void Program::check_heads(int layer, int heads) const {
  expect(places_.has(layer), "no such layer");
  expect(heads > 0 && heads % kv_.kv_heads == 0, "query heads must be a multiple of key-value heads");
}

void Program::norm_heads(int x, const float* weight, long group, float eps, long first, long count) {
  const Slot& in = given(x, false, "the norm takes hidden values");
  expect(first >= 0 && count > 0 && group > 0 && first + count * group <= in.width, "the groups must be columns of x");
  nodes_.push_back({.op = Op::kOther, .in = x, .out = x, .other = [=, this](const StepView&) {
    const Slot& slot = slots_[static_cast<size_t>(x)];
    family_.norm_heads({reinterpret_cast<float*>(data(x)), this->count(slot.rows), slot.width, weight, group, eps, first,
                        count});
  }});
}

int Program::rope_and_write(int qkv, const RopeView& rope, const float* q_scale, int layer, int heads) {
  const Slot& in = given(qkv, false, "rotation takes hidden values");
  check_heads(layer, heads);
  expect(!kv_.shared, "the KV memory holds latent vectors");
  expect(in.width == (heads + static_cast<long>(kv_.kv_heads)) * kv_.key_dim + static_cast<long>(kv_.kv_heads) * kv_.value_dim,
         "qkv must be [T, (H + G) C + G value_dim]");
  expect(2 * rope.pairs <= kv_.key_dim, "the rope table has more columns than a head");
  expect(in.rows == RowsOf::kTokens, "keys and values are those of all tokens");
  const auto run = [=, this, out = next_slot()](const StepView& step) {
    const auto* from = reinterpret_cast<const float*>(data(qkv));
    family_.rope_and_write({from, rope, step.batch.positions, q_scale, step.sequence_of, places_.of(step.batch, layer), kv_,
                            places_.place(layer), heads, data(out)},
                           compute_);
  };
  return add({.op = Op::kOther, .in = qkv, .out = -1, .writes = true, .other = run},
             static_cast<long>(heads) * kv_.key_dim, RowsOf::kTokens, true);
}

int Program::heads_of(int q) const {
  const long width = given(q, true, "attention takes values of the compute type").width;
  expect(width % kv_.key_dim == 0, "q must be compute [T, H, C]");
  return static_cast<int>(width / kv_.key_dim);
}

int Program::attention(int q, int layer, const KeyRule& rule, const Softmax& softmax) {
  const Slot& in = given(q, true, "attention takes values of the compute type");
  const int heads = heads_of(q);
  check_heads(layer, heads);
  expect(in.rows == RowsOf::kTokens, "attention is that of all tokens");
  const auto run = [=, this, &cut = cut_of(heads, rule), out = next_slot()](const StepView& step) {
    if (!cut.made) cut.cut.cut(kv_, step.batch, heads, rule, cut.args);
    cut.made = true;
    cut.args.q = data(q);
    cut.args.batch = places_.of(step.batch, layer);
    cut.args.layer = places_.place(layer);
    cut.args.softmax = softmax;
    cut.args.out = data(out);
    family_.attention(cut.args, compute_);
  };
  return add({.op = Op::kOther, .in = q, .out = -1, .other = run}, static_cast<long>(heads) * kv_.value_dim,
             RowsOf::kTokens, true);
}

void Program::check_latent(const RopeView& rope) const {
  expect(kv_.shared && kv_.kv_heads == 1, "the KV memory holds no latent vectors");
  expect(kv_.key_dim - kv_.value_dim == 2 * rope.pairs, "the columns behind the values are rotated");
}

void Program::check_heads_weight(const Matrix& weight, long heads) const {
  expect(weight.form == Matrix::Form::kPlain, "products of heads read plain weights");
  expect(heads > 0 && weight.plain.n % heads == 0, "the weight must be [H N, K]");
  expect(weight.plain.segments == 1 && weight.plain.direct(), "a product of heads is one segment of whole cells");
}

void Program::latent_write(int latent, const float* weight, float eps, const RopeView& rope, int layer) {
  const Slot& in = given(latent, false, "latent vectors are hidden values");
  check_heads(layer, 1);
  check_latent(rope);
  expect(in.width == kv_.key_dim && in.rows == RowsOf::kTokens, "latent must be [T, C]");
  nodes_.push_back({.op = Op::kOther, .in = latent, .out = latent, .writes = true, .other = [=, this](const StepView& step) {
    const auto* from = reinterpret_cast<const float*>(data(latent));
    family_.latent_write({from, weight, eps, rope, step.sequence_of, places_.of(step.batch, layer), kv_,
                          places_.place(layer)},
                         compute_);
  }});
}

int Program::latent_query(int q, const Matrix& absorb, const RopeView& rope, int heads) {
  const Slot& in = given(q, false, "rotation takes hidden values");
  check_latent(rope);
  check_heads_weight(absorb, heads);
  const PackedView& weight = absorb.plain;
  expect(weight.n == static_cast<long>(heads) * kv_.value_dim, "the absorbed matrices must be [H value_dim, K]");
  expect(in.width == heads * (weight.k + 2 * rope.pairs) && in.rows == RowsOf::kTokens, "q must be [T, H (K + rotated)]");
  const auto run = [=, this, out = next_slot()](const StepView& step) {
    const long tokens = step.batch.tokens, bytes = compute_ == Compute::kBf16 ? 2 : 4;
    void* x = shared_workspace(static_cast<size_t>(tokens * heads * weight.k * bytes));
    const auto* from = reinterpret_cast<const float*>(data(q));
    family_.latent_split({from, rope, step.batch, heads, weight.k, x, data(out), kv_.key_dim}, compute_);
    family_.heads_linear({x, tokens, heads, weight, data(out), kv_.key_dim}, compute_);
  };
  return add({.op = Op::kOther, .in = q, .out = -1, .other = run}, static_cast<long>(heads) * kv_.key_dim,
             RowsOf::kTokens, true);
}

int Program::heads_linear(int x, const Matrix& matrix, int heads) {
  const Slot& in = given(x, true, "a linear takes values of the compute type");
  check_heads_weight(matrix, heads);
  const PackedView& weight = matrix.plain;
  expect(in.width == heads * weight.k, "x must be compute [T, H, K]");
  const auto run = [=, this, rows = in.rows, out = next_slot()](const StepView&) {
    family_.heads_linear({data(x), count(rows), heads, weight, data(out), weight.n / heads}, compute_);
  };
  return add({.op = Op::kOther, .in = x, .out = -1, .other = run}, weight.n, in.rows, true);
}

Program::Cut& Program::cut_of(int heads, const KeyRule& rule) {
  for (Cut& cut : cuts_)
    if (cut.heads == heads && cut.rule.is(rule)) return cut;
  return cuts_.emplace_back(Cut{.heads = heads, .rule = rule});
}

}  // namespace penstock
