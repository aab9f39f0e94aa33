// A model's step as one list of operations over pooled buffers: recorded once, run by one call for any tokens and rows.
//
// A value of the list ("slot") has a fixed width and a number of rows that is known when the list is run.  Slots that
// never live at once share a buffer; all buffers lie in one arena, which grows when a step needs more than any before.
// Knows nothing about Python.  Recording checks shapes once; what changes from step to step the caller has checked.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <vector>

#include "attention/attention_partitions.hpp"
#include "attention/layer_places.hpp"
#include "gemm/matrix.hpp"
#include "lora/adapters.hpp"
#include "moe/expert_run.hpp"
#include "threads/arena.hpp"

namespace penstock {

class ShmGroup;

// What a slot has a row for.
enum class RowsOf : uint8_t {
  kTokens,  // every token of the step
  kWanted,  // every row whose hidden state is wanted
  kDrawn,   // wanted rows that draw a token: all but the first `scored`
  kStored,  // drawn rows whose logits are stored: the first `stored` of them
};

struct StepView {
  const int32_t* tokens;  // [batch.tokens]
  BatchView batch;
  const int32_t* sequence_of;
  const int32_t* wanted;  // [wanted_count], rows of the step
  long wanted_count;
  long scored;  // the first wanted rows, of which only the hidden state is asked for
  Pick* picks;  // [picked]: of the last drawn rows, whose tokens are wanted without logits
  long picked;
  const int32_t* given_rows = nullptr;  // [given_count], rows of the step
  const float* given = nullptr;         // [given_count, given_width()]: what stands in them instead of embeddings
  long given_count = 0;
  const float* features = nullptr;  // [batch.tokens, features_width()]
  float* taps = nullptr;            // [wanted_count, taps_width()]; null: nothing is handed out
  StateTable states{};
  const int32_t* adapters = nullptr;  // the slot of each sequence's adapter, below 0: none; null: no sequence has one
};

// Every recording method returns the slot of its result.  They throw std::invalid_argument for what does not fit.
class Program {
 public:
  Program(const Family& family, const CompressedFamily& compressed, Compute compute, const KvView& kv,
          LayerPlaces places);

  int embed(const Matrix& table);
  void place_rows(int hidden);  // once: the step's given rows
  int rms_norm(int hidden, const float* weight, long width, float eps);
  int linear(int x, const Matrix& weight);
  void linear_add(int x, const Matrix& weight, int hidden);
  void norm_heads(int x, const float* weight, long group, float eps, long first, long count);
  int rope_and_write(int qkv, const RopeView& rope, const float* q_scale, int layer, int heads);
  int attention(int q, int layer, const KeyRule& rule, const Softmax& softmax);
  void latent_write(int latent, const float* weight, float eps, const RopeView& rope, int layer);
  int latent_query(int q, const Matrix& absorb, const RopeView& rope, int heads);
  int heads_linear(int x, const Matrix& weight, int heads);
  int heads_of(int q) const;  // query heads
  int positions(const Matrix& table);  // rows of the table by absolute position
  int layer_norm(int hidden, const float* weight, const float* bias, long width, float eps);
  void layer_norm_in_place(int hidden, const float* weight, const float* bias, long width, float eps);
  void norm_add(int x, const float* weight, long width, float eps, int hidden);
  void add_bias(int x, const float* bias, long width);
  void add(int x, int hidden);
  void form(int x, const Form& form);
  int gated(int gate_up, const Gate& gate);
  int activate(int x, Activation activation, float alpha);
  int route(int logits, const Routing& how);
  void experts_add(int x, int routes, const ExpertsView& experts, const Gate& gate, int hidden);
  int features(long width);            // what comes with every token; once
  void tap(int hidden, long place);    // its wanted rows, handed out side by side with those of other places
  void lora_add(int x, const AdapterTable& table, long site, int out);  // the table must stay
  void keep(const StatesView& states);  // first of all: what recurrent layers keep
  int causal_conv(int x, const float* weight, long taps, long channels, long layer);
  int delta_rule(int qkv, int gates, long beta, long decay, const float* rates, const float* shifts, long layer);
  int gated_norm(int x, int gate, long first, const float* weight, long group, float eps);
  int sigmoid_gated(int x, int gate);
  void gated_add(int x, int gate, int hidden);
  int zeros(int like, long width);             // hidden values, as many rows as `like`
  void all_reduce(int x, ShmGroup& group);     // in place; the group must stay
  // A norm over all heads of a layer, in place.  `heads`: those of each rank, `size` columns each, one after another; this
  // rank's begin at column `first` of x.  A head may be on several ranks, with the same values.  The group must stay.
  void norm_gathered(int x, ShmGroup& group, long first, long size, std::vector<std::vector<long>> heads,
                     const float* weight, long width, float eps);
  int wanted_rows(int x);
  int drawn_rows(int hidden);  // once: what comes after is the head; the slot before is `hidden()`
  void finish(int logits);     // once, as the last
  // Instead, where ranks have rows of the head one after another, `widths` each: `logits` are those of this rank's.  Picks are
  // the best of all ranks', and rank 0 has all logits.  The group must stay.
  void finish_part(int logits, ShmGroup& group, std::vector<long> widths);

  // Runs everything; the picks of `step` end with the tokens.  Valid until the next run: hidden(), logits().
  void run(const StepView& step);

  const float* hidden() const { return reinterpret_cast<const float*>(data(hidden_)); }  // [wanted, hidden_width()]
  const float* logits() const {  // [drawn, vocabulary()], see stored()
    return head_group_ == nullptr ? reinterpret_cast<const float*>(data(logits_)) : all_logits_.data();
  }
  long hidden_width() const { return slots_[static_cast<size_t>(hidden_)].width; }
  long given_width() const { return given_width_; }  // 0: no rows can be given
  long vocabulary() const {
    long rows = 0;
    for (const long width : head_widths_) rows += width;
    return head_group_ == nullptr ? slots_[static_cast<size_t>(logits_)].width : rows;
  }
  long features_width() const { return features_width_; }  // 0: it reads none
  long taps_width() const { return taps_width_; }          // 0: it hands out none
  // Can tokens be picked without logits?  If not, every drawn row has logits.
  bool picks() const { return picks_; }
  long stored() const { return counts_[static_cast<int>(RowsOf::kStored)]; }
  bool finished() const { return finished_; }
  size_t arena_bytes() const { return arena_.bytes(); }
  long buffers() const { return static_cast<long>(widths_.size()); }
  long nodes() const { return static_cast<long>(nodes_.size()); }

 private:
  enum class Op : uint8_t {
    kEmbed, kPositions, kNorm, kLayerNorm, kNormAdd, kLinear, kBias, kAdd, kForm, kGated, kActivate, kRoute, kExperts,
    kWanted, kDrawn, kOther
  };

  struct Slot {
    long width;  // values a row
    RowsOf rows;
    bool compute;  // in the compute type, else fp32
    int chosen = 0;  // of routes: experts that they choose among
    int inside = -1;  // the slot that this one is a part of
    int buffer = -1;
    int last_use = -1;
  };

  struct Node {
    Op op;
    int in;
    int out;
    int also = -1;  // another input
    Matrix matrix{};
    const float* vector = nullptr;  // norm weights, bias
    const float* bias = nullptr;    // of a layer norm
    float number = 0;               // eps, alpha
    Form form{};
    Gate gate{};
    Routing routing{};
    ExpertsView experts{};
    bool add = false;
    bool gated = false;   // a product of which only what `gate` makes of it is stored
    bool writes = false;  // to KV pages
    bool always = true;   // also when no rows are wanted: something of it stays
    std::function<void(const StepView&)> other = {};  // what kOther does
  };

  size_t value_bytes(const Slot& slot) const { return slot.compute && compute_ == Compute::kBf16 ? 2 : 4; }
  size_t row_bytes(const Slot& slot) const { return static_cast<size_t>(slot.width) * value_bytes(slot); }
  long count(RowsOf rows) const { return counts_[static_cast<int>(rows)]; }
  char* data(int slot) const;
  float* floats(int slot) const { return reinterpret_cast<float*>(data(slot)); }
  StateStep state_step(const StepView& step, long layer) const;
  // The cut of the step's attention, for layers with equal heads that read the same keys.
  struct Cut {
    int heads;
    KeyRule rule;
    bool made = false;  // for this step
    AttentionCut cut = {};
    AttentionArgs args = {};
  };

  const Slot& given(int slot, bool compute, const char* what) const;
  void check_heads(int layer, int heads) const;
  int add(Node node, long width, RowsOf rows, bool compute);
  void fuse_gates();
  void find_head();
  int next_slot() const { return static_cast<int>(slots_.size()); }
  void drop_unused();
  void assign_buffers();
  void place(const StepView& step);
  void run_node(const Node& node, const StepView& step);
  void run_rows(const Node& node);
  void run_experts(const Node& node);
  void run_lookup(const Node& node, const int32_t* ids);
  void run_linear(const Node& node, const StepView& step);
  void exchange_head(const StepView& step);
  long head_first() const;  // id of this rank's first row of the head
  void place_adapters(const StepView& step);
  void gather(const Node& node, const StepView& step);
  void check_latent(const RopeView& rope) const;
  void check_heads_weight(const Matrix& weight, long heads) const;
  Cut& cut_of(int heads, const KeyRule& rule);

  const Family& family_;
  const CompressedFamily& compressed_;
  const QuantFamily& quantized_;
  Compute compute_;
  KvView kv_;
  LayerPlaces places_;
  StatesView states_;
  std::vector<Slot> slots_;
  std::vector<Node> nodes_;
  std::vector<std::vector<int>> users_;  // slots of each buffer
  std::vector<size_t> offsets_;          // of each buffer in the arena, in this run
  std::vector<long> widths_;             // largest bytes a row of each buffer
  long features_width_ = 0;
  long taps_width_ = 0;
  int hidden_ = -1;
  int logits_ = -1;
  long given_width_ = 0;
  bool picks_ = false;
  int head_ = -1;  // the node that computes the logits, when tokens can be picked
  Form head_form_{};
  ShmGroup* head_group_ = nullptr;  // the ranks that have parts of the head
  std::vector<long> head_widths_;
  std::vector<float> all_logits_;   // of all ranks
  std::vector<uint64_t> bests_;
  std::vector<float> gathered_;     // heads of all ranks
  bool finished_ = false;
  long counts_[4] = {};
  Arena arena_;
  char* base_ = nullptr;
  std::deque<Cut> cuts_;  // attention points into them
  ExpertRun expert_run_;
  AdapterRun adapter_run_;
  std::vector<int32_t> token_adapters_, wanted_adapters_;  // of this step
};

}  // namespace penstock
