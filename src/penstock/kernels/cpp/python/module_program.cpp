// The Python face of recorded steps: recording operation by operation, and running all of them in one call.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <limits>
#include <memory>

#include "families/dispatch.hpp"
#include "program/program.hpp"
#include "python/adapter_arguments.hpp"
#include "python/binding.hpp"
#include "python/expert_arguments.hpp"
#include "python/sampling_results.hpp"
#include "python/shm_group_binding.hpp"

namespace penstock {
namespace {

// The arrays of a step, whose content may change from run to run while their sizes do not.
struct StepInputs {
  In<int32_t, 1> tokens, wanted;
  std::optional<In<int32_t, 1>> adapters;
  Batch batch;
  In<int32_t, 1> given_rows;
  In<float, 2> given;
  In<uint64_t, 1> seeds;
  In<uint32_t, 1> positions, choices;
  In<float, 1> temperatures;
  Out<int32_t, 1> drawn;
  std::vector<Pick> picks;
  long given_count = 0;
  In<float, 2> features;
  Out<float, 2> taps;
  long features_width = 0, taps_width = 0;

  StepInputs(In<int32_t, 1> tokens_T, In<int32_t, 1> positions_T, In<int32_t, 1> starts_S1, In<int32_t, 2> table_SP,
             In<int32_t, 1> wanted_R, std::optional<In<int32_t, 2>> turns_T3)
      : tokens(std::move(tokens_T)),
        wanted(std::move(wanted_R)),
        batch(std::move(positions_T), std::move(starts_S1), std::move(table_SP), std::move(turns_T3)) {
    require(dim(tokens, 0) == batch.view.tokens && batch.view.tokens > 0, "a position for every token");
  }

  // Rows of hidden values that stand instead of embeddings.
  void give(In<int32_t, 1> rows_G, In<float, 2> values_GD) {
    require(dim(rows_G, 0) == dim(values_GD, 0), "values for every given row");
    given_rows = std::move(rows_G);
    given = std::move(values_GD);
    given_count = dim(given_rows, 0);
  }

  // The slot of every sequence's adapter, below 0 for none.
  void adapt(In<int32_t, 1> adapters_S) {
    require(dim(adapters_S, 0) == batch.view.sequences, "a slot for every sequence");
    adapters = std::move(adapters_S);
  }

  // Pages of the states of every sequence.
  void recur(In<int32_t, 2> states_SW) { batch.recur(std::move(states_SW)); }

  // How the last rows draw: seeds, positions, choices, temperatures; where their tokens go.
  void pick(In<uint64_t, 1> seeds_F, In<uint32_t, 1> positions_F, In<uint32_t, 1> choices_F,
            In<float, 1> temperatures_F, Out<int32_t, 1> drawn_F) {
    const long count = dim(drawn_F, 0);
    require(dim(seeds_F, 0) == count && dim(positions_F, 0) == count && dim(choices_F, 0) == count &&
                dim(temperatures_F, 0) == count && count <= dim(wanted, 0),
            "one seed, position, choice and temperature for every picked row");
    seeds = std::move(seeds_F);
    positions = std::move(positions_F);
    choices = std::move(choices_F);
    temperatures = std::move(temperatures_F);
    drawn = std::move(drawn_F);
    picks.resize(static_cast<size_t>(count));
  }

  // What comes with every token, and where hidden states of the wanted rows go.
  void bring(In<float, 2> features_TW) {
    require(dim(features_TW, 0) == batch.view.tokens, "features for every token");
    features_width = dim(features_TW, 1);
    features = std::move(features_TW);
  }
  void hand_out(Out<float, 2> taps_RW) {
    require(dim(taps_RW, 0) == dim(wanted, 0), "room for every wanted row");
    taps_width = dim(taps_RW, 1);
    taps = std::move(taps_RW);
  }

  StepView view(const KvMemory& kv, long vocabulary, long scored, long slots) {
    require_ids(ids_of(tokens), vocabulary, "token id outside the vocabulary");
    require_ids(ids_of(wanted), batch.view.tokens, "a wanted row is no row of the step");
    if (given_count > 0) require_ids(ids_of(given_rows), batch.view.tokens, "a given row is no row of the step");
    batch.check();
    batch.check_pages(kv.view.pages, kv.places.groups());
    if (kv.states.layers > 0) batch.check_states(kv.states, kv.view.pages);
    for (long s = 0; adapters && s < dim(*adapters, 0); ++s) require((*adapters)(s) < slots, "no adapter has this slot");
    for (size_t i = 0; i < picks.size(); ++i) {
      const uint64_t seed = seeds.data()[i];
      const DrawKey key{static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32), positions.data()[i],
                        choices.data()[i]};
      const float temperature = temperatures.data()[i];
      picks[i] = {0, key, temperature, temperature < kGreedyBelow};
    }
    return {tokens.data(), batch.view,   batch.sequence_of.data(),        wanted.data(), dim(wanted, 0),
            scored,        picks.data(), static_cast<long>(picks.size()), given_rows.data(), given.data(), given_count,
            features_width ? features.data() : nullptr, taps_width ? taps.data() : nullptr, batch.state_table(),
            adapters ? adapters->data() : nullptr};
  }

  Draw draw_of(size_t pick) const {
    Draw how;
    how.seed = seeds.data()[pick];
    how.position = positions.data()[pick];
    how.choice = choices.data()[pick];
    how.temperature = temperatures.data()[pick];
    return how;
  }
};

class RecordedStep {
 public:
  RecordedStep(const std::string& family, const std::string& compute, const KvMemory& kv)
      : family_(find_family(family.c_str())), kv_(kv) {
    require(family_ != nullptr, "this kernel family cannot run here");
    require(compute == "bf16" || compute == "fp32", "the compute type must be bf16 or fp32");
    per_cell_ = compute == "bf16" ? 2 : 1;
    program_ = std::make_unique<Program>(*family_, compressed_family(family.c_str()),
                                         per_cell_ == 2 ? Compute::kBf16 : Compute::kFp32, kv.view, kv.places);
    program_->keep(kv.states);
  }

  int embed(const nb::object& table) {
    const Matrix matrix = matrix_of(table);
    tokens_below_ = outputs(matrix);
    return program_->embed(matrix);
  }
  void place_rows(int hidden) { program_->place_rows(hidden); }
  int rms_norm(int hidden, const In<float, 1>& weight, float eps) {
    return program_->rms_norm(hidden, held(weight), dim(weight, 0), eps);
  }
  int linear(int x, const nb::object& weight) { return program_->linear(x, matrix_of(weight)); }
  void linear_add(int x, const nb::object& weight, int hidden) { program_->linear_add(x, matrix_of(weight), hidden); }
  void norm_heads(int x, const In<float, 1>& weight, float eps, long first, long count) {
    program_->norm_heads(x, held(weight), dim(weight, 0), eps, first, count);
  }
  int rope_and_write(int qkv, const nb::object& rope, const std::optional<In<float, 1>>& q_scale, int layer, int heads) {
    if (q_scale) limit_positions(dim(*q_scale, 0));
    return program_->rope_and_write(qkv, rope_of(rope), q_scale ? held(*q_scale) : nullptr, layer, heads);
  }
  void latent_write(int latent, const In<float, 1>& weight, float eps, const nb::object& rope, int layer) {
    program_->latent_write(latent, held(weight), eps, rope_of(rope), layer);
  }
  int latent_query(int q, const nb::object& absorb, const nb::object& rope, int heads) {
    return program_->latent_query(q, matrix_of(absorb), rope_of(rope), heads);
  }
  int heads_linear(int x, const nb::object& weight, int heads) {
    return program_->heads_linear(x, matrix_of(weight), heads);
  }
  int attention(int q, int layer, const nb::object& rule) {
    held_.push_back(rule);
    const auto& own = nb::cast<const AttentionRule&>(rule);
    own.check(program_->heads_of(q));
    keys_until_ = std::max(keys_until_, own.keys.until);
    return program_->attention(q, layer, own.keys, own.softmax);
  }
  int positions(const nb::object& table) {
    const Matrix matrix = matrix_of(table);
    limit_positions(outputs(matrix));
    return program_->positions(matrix);
  }
  int layer_norm(int hidden, const In<float, 1>& weight, const std::optional<In<float, 1>>& bias, float eps) {
    require(!bias || dim(*bias, 0) == dim(weight, 0), "bias must be [D]");
    return program_->layer_norm(hidden, held(weight), bias ? held(*bias) : nullptr, dim(weight, 0), eps);
  }
  void layer_norm_in_place(int hidden, const In<float, 1>& weight, const std::optional<In<float, 1>>& bias, float eps) {
    require(!bias || dim(*bias, 0) == dim(weight, 0), "bias must be [D]");
    program_->layer_norm_in_place(hidden, held(weight), bias ? held(*bias) : nullptr, dim(weight, 0), eps);
  }
  void norm_add(int x, const In<float, 1>& weight, float eps, int hidden) {
    program_->norm_add(x, held(weight), dim(weight, 0), eps, hidden);
  }
  void add_bias(int x, const In<float, 1>& bias) { program_->add_bias(x, held(bias), dim(bias, 0)); }
  void add(int x, int hidden) { program_->add(x, hidden); }
  void form(int x, float scale, float cap) { program_->form(x, form_of(scale, cap)); }
  int gated(int gate_up, const GateWords& gate) { return program_->gated(gate_up, gate_of(gate)); }
  int activate(int x, int activation, float alpha) { return program_->activate(x, activation_of(activation), alpha); }
  int route(int logits, const RoutingWords& words, const std::optional<In<float, 1>>& bias) {
    require(!bias || dim(*bias, 0) == std::get<0>(words), "bias must be [E]");
    return program_->route(logits, routing_of(words, bias ? held(*bias) : nullptr));
  }
  void experts_add(int x, int routes, const nb::object& experts, const GateWords& gate, int hidden) {
    held_.push_back(experts);
    const auto& own = nb::cast<const Experts&>(experts);
    require(own.per_cell == per_cell_, "the weights were packed for the other compute type");
    program_->experts_add(x, routes, own.view, gate_of(gate), hidden);
  }
  int features(long width) { return program_->features(width); }
  int zeros(int like, long width) { return program_->zeros(like, width); }
  void all_reduce(int x, const nb::object& group) {
    held_.push_back(group);
    program_->all_reduce(x, nb::cast<PyShmGroup&>(group).group());
  }
  void norm_gathered(int x, const nb::object& group, long first, long size, std::vector<std::vector<long>> heads,
                     const In<float, 1>& weight, float eps) {
    held_.push_back(group);
    program_->norm_gathered(x, nb::cast<PyShmGroup&>(group).group(), first, size, std::move(heads), held(weight),
                            dim(weight, 0), eps);
  }
  void tap(int hidden, long place) { program_->tap(hidden, place); }
  void lora_add(int x, const nb::object& adapters, long site, int out) {
    held_.push_back(adapters);
    const auto& own = nb::cast<const Adapters&>(adapters);
    require(own.per_cell == per_cell_, "the adapters were packed for the other compute type");
    slots_ = slots_ == 0 ? own.table.slots() : std::min(slots_, own.table.slots());
    program_->lora_add(x, own.table, site, out);
  }
  int causal_conv(int x, const In<float, 2>& weight, long layer) {
    held_.push_back(nb::cast(weight));
    return program_->causal_conv(x, weight.data(), dim(weight, 0), dim(weight, 1), layer);
  }
  int delta_rule(int qkv, int gates, std::pair<long, long> columns, const In<float, 1>& rates,
                 const In<float, 1>& shifts, long layer) {
    require(dim(rates, 0) == kv_.states.heads && dim(shifts, 0) == kv_.states.heads, "a rate and a shift for every head");
    return program_->delta_rule(qkv, gates, columns.first, columns.second, held(rates), held(shifts), layer);
  }
  int gated_norm(int x, int gate, long first, const In<float, 1>& weight, float eps) {
    return program_->gated_norm(x, gate, first, held(weight), dim(weight, 0), eps);
  }
  int sigmoid_gated(int x, int gate) { return program_->sigmoid_gated(x, gate); }
  void gated_add(int x, int gate, int hidden) { program_->gated_add(x, gate, hidden); }
  int wanted_rows(int x) { return program_->wanted_rows(x); }
  int drawn_rows(int hidden) { return program_->drawn_rows(hidden); }
  void finish(int logits) { program_->finish(logits); }
  void finish_part(int logits, const nb::object& group, std::vector<long> widths) {
    held_.push_back(group);
    program_->finish_part(logits, nb::cast<PyShmGroup&>(group).group(), std::move(widths));
  }

  // The answers of `rows`, which follow the `scored` ones; those of the picks are in their array.  `ready`, if there is
  // one, is called when the logits are there: until it returns, the rows' masks may still be written.
  std::vector<Answer> run(StepInputs& inputs, long scored, const std::vector<const DrawRow*>& rows,
                          const nb::object& ready) {
    const auto picked = static_cast<long>(inputs.picks.size()), listed = static_cast<long>(rows.size());
    require(scored >= 0 && scored + listed + picked == dim(inputs.wanted, 0), "a draw for every row that is not scored");
    const StepView step = checked_view(inputs, scored);
    for (const DrawRow* row : rows) row->check(program_->vocabulary());
    const auto draw_all = [&] {
      draw_rows(*family_, program_->logits(), program_->vocabulary(), rows, drawn_);
      for (size_t i = 0; i < inputs.picks.size(); ++i) inputs.drawn.data()[i] = picked_token(inputs, i, rows.size() + i);
    };
    if (ready.is_none()) {
      without_gil([&] {
        program_->run(step);
        draw_all();
      });
    } else {
      without_gil([&] { program_->run(step); });
      ready();
      without_gil(draw_all);
    }
    last_ = {step.wanted_count, program_->stored()};
    return answers_of(drawn_);
  }

  // The same on a rank that draws nothing itself: tokens of the picks are found together, in `drawn`.
  void compute(StepInputs& inputs, long scored) {
    require(scored >= 0 && scored + static_cast<long>(inputs.picks.size()) <= dim(inputs.wanted, 0), "more scored rows than are wanted");
    const StepView step = checked_view(inputs, scored);
    without_gil([&] { program_->run(step); });
    last_ = {step.wanted_count, program_->stored()};
  }

  // Hidden states of the first wanted rows of the last run.
  void read_hidden(const Out<float, 2>& out) const {
    require(dim(out, 0) <= last_.wanted && dim(out, 1) == program_->hidden_width(), "out must be [wanted, D]");
    std::copy_n(program_->hidden(), out.size(), out.data());
  }
  // Logits of the first drawn rows of the last run: those that did not pick.
  void read_logits(const Out<float, 2>& out) const {
    require(dim(out, 0) <= last_.stored && dim(out, 1) == program_->vocabulary(), "out must be [stored, V]");
    std::copy_n(program_->logits(), out.size(), out.data());
  }
  std::pair<long, long> hidden_shape() const { return {last_.wanted, program_->hidden_width()}; }
  std::pair<long, long> logits_shape() const { return {last_.stored, program_->vocabulary()}; }
  bool picks() const { return program_->picks(); }
  size_t arena_bytes() const { return program_->arena_bytes(); }
  long buffers() const { return program_->buffers(); }
  long nodes() const { return program_->nodes(); }

 private:
  struct Last {
    long wanted = 0;
    long stored = 0;
  };

  StepView checked_view(StepInputs& inputs, long scored) {
    require(program_->finished(), "the recording is not finished");
    require(inputs.features_width == program_->features_width(), "a step brings the features that were recorded");
    require(inputs.taps_width == 0 || inputs.taps_width == program_->taps_width(), "room for the taps that were recorded");
    const StepView step = inputs.view(kv_, tokens_below_, scored, slots_);
    require(inputs.given_count == 0 || dim(inputs.given, 1) == program_->given_width(),
            "given rows must be [G, D], and the step must place them");
    require(positions_below_ < 0 || inputs.batch.last_position < positions_below_,
            "the tables of positions must reach the last one");
    require(keys_until_ <= inputs.batch.shortest, "every sequence must reach the keys that all its tokens see");
    return step;
  }

  // Rows of a table over positions.
  void limit_positions(long rows) {
    positions_below_ = positions_below_ < 0 ? rows : std::min(positions_below_, rows);
  }

  const float* held(const In<float, 1>& vector) {
    held_.push_back(nb::cast(vector));
    return vector.data();
  }

  RopeView rope_of(const nb::object& rope) {
    if (rope.is_none()) return {};
    held_.push_back(rope);
    const auto& own = nb::cast<const Rope&>(rope);
    limit_positions(own.positions);
    return own.view;
  }

  Matrix matrix_of(const nb::object& weight) {
    held_.push_back(weight);
    return matrix_from(weight, per_cell_);
  }

  int32_t picked_token(const StepInputs& inputs, size_t pick, size_t drawn_row) const {
    if (program_->picks()) {
      const uint64_t best = inputs.picks[pick].best;
      return best == 0 ? 0 : static_cast<int32_t>(~static_cast<uint32_t>(best));
    }
    const float* logits = program_->logits() + static_cast<long>(drawn_row) * program_->vocabulary();
    return draw(*family_, logits, program_->vocabulary(), inputs.draw_of(pick)).token;
  }

  const Family* family_;
  const KvMemory& kv_;  // stays as long as this does
  int per_cell_;
  long tokens_below_ = std::numeric_limits<int32_t>::max();  // a step that begins with features looks none up
  long slots_ = 0;  // of the adapters that were recorded; 0: none were
  long positions_below_ = -1;  // rows of the shortest table by position
  long keys_until_ = 0;  // of sequences whose first keys all tokens see
  Last last_;
  std::unique_ptr<Program> program_;
  std::vector<nb::object> held_;  // what the recorded operations point into
  std::vector<Drawn> drawn_;
};

}  // namespace

void bind_program(nb::module_& m) {
  nb::class_<StepInputs>(m, "StepInputs")
      .def(nb::init<In<int32_t, 1>, In<int32_t, 1>, In<int32_t, 1>, In<int32_t, 2>, In<int32_t, 1>,
                    std::optional<In<int32_t, 2>>>(),
           nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none())
      .def("give", &StepInputs::give)
      .def("pick", &StepInputs::pick)
      .def("bring", &StepInputs::bring)
      .def("hand_out", &StepInputs::hand_out)
      .def("recur", &StepInputs::recur)
      .def("adapt", &StepInputs::adapt);
  nb::class_<RecordedStep>(m, "RecordedStep")
      .def(nb::init<const std::string&, const std::string&, const KvMemory&>(), nb::keep_alive<1, 4>())
      .def("embed", &RecordedStep::embed)
      .def("place_rows", &RecordedStep::place_rows)
      .def("rms_norm", &RecordedStep::rms_norm)
      .def("linear", &RecordedStep::linear)
      .def("linear_add", &RecordedStep::linear_add)
      .def("norm_heads", &RecordedStep::norm_heads)
      .def("rope_and_write", &RecordedStep::rope_and_write, nb::arg(), nb::arg().none(), nb::arg().none(), nb::arg(),
           nb::arg())
      .def("latent_write", &RecordedStep::latent_write)
      .def("latent_query", &RecordedStep::latent_query)
      .def("heads_linear", &RecordedStep::heads_linear)
      .def("attention", &RecordedStep::attention)
      .def("positions", &RecordedStep::positions)
      .def("layer_norm", &RecordedStep::layer_norm, nb::arg(), nb::arg(), nb::arg().none(), nb::arg())
      .def("layer_norm_in_place", &RecordedStep::layer_norm_in_place, nb::arg(), nb::arg(), nb::arg().none(), nb::arg())
      .def("norm_add", &RecordedStep::norm_add)
      .def("add_bias", &RecordedStep::add_bias)
      .def("add", &RecordedStep::add)
      .def("form", &RecordedStep::form)
      .def("gated", &RecordedStep::gated)
      .def("activate", &RecordedStep::activate)
      .def("route", &RecordedStep::route, nb::arg(), nb::arg(), nb::arg().none())
      .def("experts_add", &RecordedStep::experts_add)
      .def("features", &RecordedStep::features)
      .def("zeros", &RecordedStep::zeros)
      .def("all_reduce", &RecordedStep::all_reduce)
      .def("norm_gathered", &RecordedStep::norm_gathered)
      .def("tap", &RecordedStep::tap)
      .def("lora_add", &RecordedStep::lora_add)
      .def("causal_conv", &RecordedStep::causal_conv)
      .def("delta_rule", &RecordedStep::delta_rule)
      .def("gated_norm", &RecordedStep::gated_norm)
      .def("sigmoid_gated", &RecordedStep::sigmoid_gated)
      .def("gated_add", &RecordedStep::gated_add)
      .def("wanted_rows", &RecordedStep::wanted_rows)
      .def("drawn_rows", &RecordedStep::drawn_rows)
      .def("finish", &RecordedStep::finish)
      .def("finish_part", &RecordedStep::finish_part)
      .def("compute", &RecordedStep::compute)
      .def("run", &RecordedStep::run, nb::arg(), nb::arg(), nb::arg(), nb::arg().none())
      .def("read_hidden", &RecordedStep::read_hidden)
      .def("read_logits", &RecordedStep::read_logits)
      .def_prop_ro("hidden_shape", &RecordedStep::hidden_shape)
      .def_prop_ro("logits_shape", &RecordedStep::logits_shape)
      .def_prop_ro("picks", &RecordedStep::picks)
      .def_prop_ro("arena_bytes", &RecordedStep::arena_bytes)
      .def_prop_ro("buffers", &RecordedStep::buffers)
      .def_prop_ro("nodes", &RecordedStep::nodes);
}

}  // namespace penstock
