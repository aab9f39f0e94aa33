// The Python face of recurrent layers: convolution, delta rule, and the gates around them.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include "families/dispatch.hpp"
#include "python/binding.hpp"

namespace penstock {
namespace {

using Values = Out<float, 2>;  // changed in place

// One family and one compute type.
class StateKernels {
 public:
  StateKernels(const std::string& name, const std::string& compute)
      : family_(find_family(name.c_str())), compute_(compute == "bf16" ? Compute::kBf16 : Compute::kFp32) {
    require(family_ != nullptr, "this kernel family cannot run here");
    require(compute == "bf16" || compute == "fp32", "the compute type must be bf16 or fp32");
  }

  void causal_conv(const In<float, 2>& x, const In<float, 2>& weight, const KvMemory& kv, long layer, const Batch& batch,
                   const Values& out) const {
    const StateStep step = step_of(kv, layer, batch);
    const long tokens = batch.view.tokens, channels = step.states.channels();
    require(dim(x, 0) == tokens && dim(x, 1) >= channels, "x must be [T, N] with all channels");
    require(dim(weight, 0) == step.states.taps && dim(weight, 1) == channels, "weight must be [K, C]");
    require(dim(out, 0) == tokens && dim(out, 1) == channels, "out must be [T, C]");
    without_gil([&] { family_->causal_conv({x.data(), dim(x, 1), weight.data(), step, out.data()}); });
  }

  void delta_rule(const In<float, 2>& qkv, const In<float, 2>& gates, std::pair<long, long> columns,
                  const In<float, 1>& rates, const In<float, 1>& shifts, const KvMemory& kv, long layer,
                  const Batch& batch, const Values& out) const {
    const StateStep step = step_of(kv, layer, batch);
    const long tokens = batch.view.tokens, heads = step.states.heads;
    require(dim(qkv, 0) == tokens && dim(qkv, 1) == step.states.channels(), "qkv must be [T, C]");
    require(dim(gates, 0) == tokens, "gates must be [T, N]");
    for (const long first : {columns.first, columns.second})
      require(first >= 0 && first + heads <= dim(gates, 1), "the gates of all heads must be columns");
    require(dim(rates, 0) == heads && dim(shifts, 0) == heads, "a rate and a shift for every head");
    require(dim(out, 0) == tokens && dim(out, 1) == heads * step.states.value_dim, "out must be [T, H value_dim]");
    const DeltaArgs args{qkv.data(),   gates.data(), dim(gates, 1), columns.first, columns.second,
                         rates.data(), shifts.data(), step,         out.data()};
    without_gil([&] { family_->delta_rule(args); });
  }

  void gated_norm(const In<float, 2>& x, const In<float, 2>& gate, long first, const In<float, 1>& weight, float eps,
                  const AnyOut& out) const {
    require(dim(x, 0) == dim(gate, 0) && first >= 0 && first + dim(x, 1) <= dim(gate, 1), "a gate for every column of x");
    require(dim(weight, 0) > 0 && dim(x, 1) % dim(weight, 0) == 0, "columns of x must be whole groups");
    check_compute(out, x.size());
    const GatedNormArgs args{x.data(), dim(x, 0),     dim(x, 1),      gate.data(), dim(gate, 1),
                             first,    weight.data(), dim(weight, 0), eps,         out.data()};
    without_gil([&] { family_->gated_norm(args, compute_); });
  }

  void sigmoid_gated(const AnyIn& x, const In<float, 2>& gate, const AnyOut& out) const {
    require(x.size() == gate.size() && x.itemsize() == size(), "x must be compute [T, N], with a gate for every number");
    check_compute(out, x.size());
    const SigmoidGatedArgs args{x.data(), gate.data(), dim(gate, 0), dim(gate, 1), out.data()};
    without_gil([&] { family_->sigmoid_gated(args, compute_); });
  }

  void gated_add(const In<float, 2>& x, const In<float, 2>& gate, const Values& hidden) const {
    require(dim(x, 0) == dim(hidden, 0) && dim(x, 1) == dim(hidden, 1), "x and hidden must be [T, D]");
    require(dim(gate, 0) == dim(x, 0) && dim(gate, 1) == 1, "a gate for every row");
    without_gil([&] { family_->gated_add({hidden.data(), x.data(), gate.data(), dim(x, 0), dim(x, 1)}); });
  }

 private:
  size_t size() const { return compute_ == Compute::kBf16 ? 2 : 4; }

  void check_compute(const AnyOut& out, size_t count) const {
    require(out.size() == count && out.itemsize() == size(), "out has another shape or type");
  }

  static StateStep step_of(const KvMemory& kv, long layer, const Batch& batch) {
    require(layer >= 0 && layer < kv.states.layers, "the KV memory keeps no state of this layer");
    batch.check_states(kv.states, kv.view.pages);
    return {kv.states, batch.state_table(), batch.view, layer};
  }

  const Family* family_;
  Compute compute_;
};

}  // namespace

void bind_states(nb::module_& m) {
  nb::class_<StateKernels>(m, "StateKernels")
      .def(nb::init<const std::string&, const std::string&>())
      .def("causal_conv", &StateKernels::causal_conv)
      .def("delta_rule", &StateKernels::delta_rule)
      .def("gated_norm", &StateKernels::gated_norm)
      .def("sigmoid_gated", &StateKernels::sigmoid_gated)
      .def("gated_add", &StateKernels::gated_add);
}

}  // namespace penstock
