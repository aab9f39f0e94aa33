// The Python face of the operations that go row by row: activations, norms, biases, sums.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include "families/dispatch.hpp"
#include "python/binding.hpp"

namespace penstock {
namespace {

using Values = Out<float, 2>;  // changed in place

// One family and one compute type.
class RowKernels {
 public:
  RowKernels(const std::string& name, const std::string& compute)
      : family_(find_family(name.c_str())), compute_(compute == "bf16" ? Compute::kBf16 : Compute::kFp32) {
    require(family_ != nullptr, "this kernel family cannot run here");
    require(compute == "bf16" || compute == "fp32", "the compute type must be bf16 or fp32");
  }

  void gated(const In<float, 2>& gate_up, const GateWords& gate, const AnyOut& out) const {
    require(dim(gate_up, 1) % 2 == 0, "gate_up must be [T, 2 I]");
    check_out(out, gate_up.size() / 2);
    const GatedArgs args{gate_up.data(), dim(gate_up, 0), dim(gate_up, 1) / 2, gate_of(gate), out.data()};
    without_gil([&] { family_->gated(args, compute_); });
  }

  void activate(const In<float, 2>& x, int activation, float alpha, const AnyOut& out) const {
    check_out(out, x.size());
    const ActivateArgs args{x.data(), dim(x, 0), dim(x, 1), activation_of(activation), alpha, out.data()};
    without_gil([&] { family_->activate(args, compute_); });
  }

  void layer_norm(const In<float, 2>& hidden, const In<float, 1>& weight, const std::optional<In<float, 1>>& bias,
                  float eps, const AnyOut& out) const {
    require(dim(weight, 0) == dim(hidden, 1), "weight must be [D]");
    require(!bias || dim(*bias, 0) == dim(hidden, 1), "bias must be [D]");
    check_out(out, hidden.size());
    const LayerNormArgs args{hidden.data(), weight.data(), bias ? bias->data() : nullptr, dim(hidden, 0), dim(hidden, 1),
                             eps, out.data()};
    without_gil([&] { family_->layer_norm(args, compute_); });
  }

  void layer_norm_in_place(const Values& hidden, const In<float, 1>& weight, const std::optional<In<float, 1>>& bias,
                           float eps) const {
    require(dim(weight, 0) == dim(hidden, 1), "weight must be [D]");
    require(!bias || dim(*bias, 0) == dim(hidden, 1), "bias must be [D]");
    const LayerNormArgs args{hidden.data(), weight.data(), bias ? bias->data() : nullptr, dim(hidden, 0), dim(hidden, 1),
                             eps, hidden.data()};
    without_gil([&] { family_->layer_norm(args, Compute::kFp32); });
  }

  void norm_add(const In<float, 2>& x, const In<float, 1>& weight, float eps, const Values& hidden) const {
    require(dim(weight, 0) == dim(x, 1), "weight must be [D]");
    check_same(x, hidden);
    const NormAddArgs args{x.data(), weight.data(), dim(x, 0), dim(x, 1), eps, hidden.data()};
    without_gil([&] { family_->norm_add(args); });
  }

  void add_bias(const Values& x, const In<float, 1>& bias) const {
    require(dim(bias, 0) == dim(x, 1), "bias must be [N]");
    const BiasArgs args{x.data(), bias.data(), nullptr, dim(x, 0), dim(x, 1)};
    without_gil([&] { family_->add_bias(args); });
  }

  void add(const In<float, 2>& x, const Values& hidden) const {
    check_same(x, hidden);
    const AddArgs args{hidden.data(), x.data(), dim(x, 0), dim(x, 1)};
    without_gil([&] { family_->add(args); });
  }

  void form(const Values& x, float scale, float cap) const {
    const FormArgs args{x.data(), dim(x, 0), dim(x, 1), form_of(scale, cap)};
    without_gil([&] { family_->form(args); });
  }

 private:
  void check_out(const AnyOut& out, size_t count) const {
    const size_t size = compute_ == Compute::kBf16 ? 2 : 4;
    require(out.size() == count && out.itemsize() == size, "out has another shape or type");
  }
  static void check_same(const In<float, 2>& x, const Values& hidden) {
    require(dim(x, 0) == dim(hidden, 0) && dim(x, 1) == dim(hidden, 1), "x and hidden must be [T, D]");
  }

  const Family* family_;
  Compute compute_;
};

}  // namespace

void bind_rows(nb::module_& m) {
  nb::class_<RowKernels>(m, "RowKernels")
      .def(nb::init<const std::string&, const std::string&>())
      .def("gated", &RowKernels::gated)
      .def("activate", &RowKernels::activate)
      .def("layer_norm", &RowKernels::layer_norm, nb::arg(), nb::arg(), nb::arg().none(), nb::arg(), nb::arg())
      .def("layer_norm_in_place", &RowKernels::layer_norm_in_place, nb::arg(), nb::arg(), nb::arg().none(), nb::arg())
      .def("norm_add", &RowKernels::norm_add)
      .def("add_bias", &RowKernels::add_bias)
      .def("add", &RowKernels::add)
      .def("form", &RowKernels::form);
}

}  // namespace penstock
