// What one kernel family offers: a table of functions over plain structs of pointers.
//
// Shapes use the letters of kernels/ops.py.  Nothing is checked here: the binding (python/module.cpp) has checked it all.
#pragma once

#include "attention/attention_args.hpp"
#include "states/state_args.hpp"

namespace penstock {

// Part of every numerics class: raised whenever the bits that any family produces change.
constexpr int kKernelVersion = 2;

constexpr int kMaxSegments = 8;

enum class Compute : int { kBf16 = 0, kFp32 = 1 };

// A packed weight: panels of 16 outputs, each [steps][16] cells; segment s covers inputs [k_begin[s], k_begin[s + 1])
// and steps [step_begin[s], step_begin[s + 1]), padded with zeros to whole cells.
struct PackedView {
  const uint32_t* cells;
  long n;
  long k;
  int segments;
  long k_begin[kMaxSegments + 1];
  long step_begin[kMaxSegments + 1];
  int per_cell;

  PS_EVERYWHERE long panels() const { return (n + 15) / 16; }
  PS_EVERYWHERE long steps() const { return step_begin[segments]; }
  // Do inputs lie in x as the cells want them, without gaps?
  PS_EVERYWHERE bool direct() const {
    for (int s = 0; s <= segments; ++s)
      if (k_begin[s] != step_begin[s] * per_cell) return false;
    return true;
  }
};

struct DrawKey {
  uint32_t seed_low;
  uint32_t seed_high;
  uint32_t position;
  uint32_t choice;
};

// The best token of a row, found while the head's panels are computed: its logits are never stored.
struct alignas(64) Pick {
  uint64_t best;      // 0: nothing yet; else the value's place among all floats, then the complement of the id
  DrawKey key;
  float temperature;  // unless greedy
  bool greedy;        // without noise
  int32_t first = 0;  // id of the head's first row: a rank may have a part of it
};

// What becomes of a value of the head: a multiple of it, then cap * tanh(value / cap).
struct Form {
  float scale = 1;
  float cap = 0;  // 0: none

  PS_EVERYWHERE bool changes() const { return scale != 1 || cap != 0; }
};

// Rows of a table; as products below, whatever the form of the weight.
template <class View>
struct EmbedArgsOf {
  View table;
  const int32_t* tokens;
  long rows;
  float* out;  // [rows, k]
};
using EmbedArgs = EmbedArgsOf<PackedView>;

struct NormArgs {
  const float* hidden;
  const float* weight;
  long rows;
  long width;
  float eps;
  void* out;
};

enum class Activation : int { kSilu = 0, kGelu = 1, kGeluTanh = 2, kRelu = 3, kRelu2 = 4, kNone = 5 };

// activation(gate) * up, in the words of kernels/ops.py's Gate.
struct Gate {
  Activation activation = Activation::kSilu;
  float alpha = 1;  // silu: x / (1 + exp(-alpha x))
  float limit = __builtin_inff();  // largest gate, and largest size of up
  float shift = 0;  // is added to up
  bool interleaved = false;

  // Can a product of `outputs` outputs store its gated values alone?
  PS_EVERYWHERE bool fits_product(long outputs) const {
    return !interleaved && shift == 0 && limit == __builtin_inff() && outputs % 32 == 0;
  }
};

// x W^T over a weight of any form.
template <class View>
struct LinearArgsOf {
  const void* x;  // compute [rows, k]
  long rows;
  View weight;
  float* out;  // [rows, n]
  bool add;    // out += product, else out = product
  Pick* picks = nullptr;  // null, or of the rows from `stored` on, whose products only go there
  long stored = 0;
  Form form{};  // of what goes to the picks
  const Gate* gate = nullptr;  // null, or outputs are a gate and what it is multiplied with: only that product is stored
  void* gated = nullptr;       // compute [rows, n / 2]
};

using LinearArgs = LinearArgsOf<PackedView>;

// Products that have nothing to do with one another but that their items are shared out together.
template <class View>
struct LinearGroupOf {
  const LinearArgsOf<View>* calls;  // each with at least one row, without picks
  long count;
};
using LinearGroup = LinearGroupOf<PackedView>;

struct GatedArgs {
  const float* gate_up;  // [rows, 2 * width]
  long rows;
  long width;
  Gate gate;
  void* out;
};

struct ActivateArgs {
  const float* x;
  long rows;
  long width;
  Activation activation;
  float alpha;
  void* out;
};

struct NormAddArgs {
  const float* x;
  const float* weight;
  long rows;
  long width;
  float eps;
  float* hidden;
};

struct LayerNormArgs {
  const float* hidden;
  const float* weight;
  const float* bias;  // may be null
  long rows;
  long width;
  float eps;
  void* out;
};

struct BiasArgs {
  float* x;
  const float* bias;     // [width], or of `which` rows
  const int32_t* which;  // [rows]: each row's bias; null: all have the first
  long rows;
  long width;
};

struct AddArgs {
  float* to;
  const float* x;
  long rows;
  long width;
};

// to[row, first:first + n] += scale * x, in one rounding.
struct AddPartArgs {
  float* to;            // [.., width]
  const float* x;       // [count, n]
  const int32_t* rows;  // [count]: which rows of `to`, each once
  long count;
  long width;
  long first;
  long n;
  float scale;
};

struct FormArgs {
  float* x;
  long rows;
  long width;
  Form form;
};

// A product of its own for every head: head h of x with rows [h * n, (h + 1) * n) of the weight.
struct HeadsArgs {
  const void* x;  // [rows, heads, k]
  long rows;
  long heads;
  PackedView weight;  // [heads * n, k], one segment, cells without gaps
  void* out;          // [rows, heads, out_stride], of which the first n columns are written
  long out_stride;
};

struct Best {
  float value;
  int32_t id;
};

struct RouteArgs;  // moe/routing.hpp
struct GatherArgs;
struct CombineArgs;

struct Family {
  const char* name;
  void (*linear)(const LinearArgs&, Compute);
  void (*linear_group)(const LinearGroup&, Compute);
  void (*embed)(const EmbedArgs&, Compute);
  void (*rms_norm)(const NormArgs&, Compute);
  void (*gated)(const GatedArgs&, Compute);
  void (*activate)(const ActivateArgs&, Compute);
  void (*layer_norm)(const LayerNormArgs&, Compute);
  void (*norm_add)(const NormAddArgs&);
  void (*add_bias)(const BiasArgs&);
  void (*add)(const AddArgs&);
  void (*form)(const FormArgs&);
  void (*add_part)(const AddPartArgs&);
  void (*route)(const RouteArgs&);
  void (*gather)(const GatherArgs&, Compute);
  void (*combine)(const CombineArgs&);
  void (*norm_heads)(const NormHeadsArgs&);
  void (*rope_and_write)(const RopeArgs&, Compute);
  void (*attention)(const AttentionArgs&, Compute);
  void (*latent_write)(const LatentWriteArgs&, Compute);
  void (*latent_split)(const LatentSplitArgs&, Compute);
  void (*heads_linear)(const HeadsArgs&, Compute);
  void (*causal_conv)(const ConvArgs&);
  void (*delta_rule)(const DeltaArgs&);
  void (*gated_norm)(const GatedNormArgs&, Compute);
  void (*sigmoid_gated)(const SigmoidGatedArgs&, Compute);
  void (*gated_add)(const GatedAddArgs&);
  void (*to_compute)(const float* from, long count, void* to, Compute);
  // Sampling, on one row.
  Best (*argmax)(const float* x, long n);
  float (*sum_exp)(const float* x, long n, float top);
  void (*exp_minus)(const float* x, long n, float top, float* out);
  void (*divide)(const float* x, long n, float by, float* out);
  long (*collect)(const float* x, long n, float floor, int32_t* ids);
  void (*gumbel)(const DrawKey& key, const int32_t* ids, long n, float* out);
  Best (*gumbel_argmax)(const DrawKey& key, const float* x, long n, float floor, Best top);
  float (*log)(float);
  // Measuring.
  uint32_t (*read_cells)(const uint32_t* cells, long count);
  double (*multiply)(long repeats, Compute);
};

}  // namespace penstock
