// The Python face of routed experts: choosing them, and adding what they make of each row.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "families/dispatch.hpp"
#include "python/binding.hpp"
#include "python/expert_arguments.hpp"

namespace penstock {
namespace {

// One family and one compute type.
class ExpertKernels {
 public:
  ExpertKernels(const std::string& name, const std::string& compute)
      : compute_(compute == "bf16" ? Compute::kBf16 : Compute::kFp32),
        family_(usable(name, compute)),
        run_(family_, compressed_family(name.c_str()), compute_) {}

  void route(const In<float, 2>& logits, const RoutingWords& words, const std::optional<In<float, 1>>& bias,
             const Out<uint32_t, 2>& routes) const {
    require(!bias || dim(*bias, 0) == dim(logits, 1), "bias must be [E]");
    const Routing how = routing_of(words, bias ? bias->data() : nullptr);
    require(dim(logits, 1) == how.experts, "logits must be [T, E]");
    require(dim(routes, 0) == dim(logits, 0) && dim(routes, 1) == how.words(), "routes must be [T, 2 top_k]");
    without_gil([&] { family_.route({logits.data(), dim(logits, 0), how, routes.data()}); });
  }

  void add(const AnyIn& x, const In<uint32_t, 2>& routes, const Experts& experts, const GateWords& gate,
           const Out<float, 2>& hidden) {
    const ExpertsView& own = experts.view;
    const long rows = dim(hidden, 0), words = dim(routes, 1);
    require(experts.per_cell == (compute_ == Compute::kBf16 ? 2 : 1), "the weights were packed for the other compute type");
    require(x.ndim() == 2 && dim(x, 0) == rows && dim(x, 1) == own.inputs && x.itemsize() == 4u / experts.per_cell,
            "x must be compute [T, K]");
    require(dim(hidden, 1) == own.outputs, "hidden must be [T, D]");
    require(dim(routes, 0) == rows && words > 0 && words % 2 == 0, "routes must be [T, 2 top_k]");
    for (long row = 0; row < rows; ++row)
      for (long j = 0; j < words / 2; ++j)
        require(routes(row, j) < static_cast<uint32_t>(own.count), "a route to an expert that is not there");
    const ExpertsArgs args{x.data(), routes.data(), rows, words / 2, own, gate_of(gate), hidden.data()};
    without_gil([&] { run_.run(args); });
  }

 private:
  static const Family& usable(const std::string& name, const std::string& compute) {
    const Family* family = find_family(name.c_str());
    require(family != nullptr, "this kernel family cannot run here");
    require(compute == "bf16" || compute == "fp32", "the compute type must be bf16 or fp32");
    return *family;
  }

  Compute compute_;
  const Family& family_;
  ExpertRun run_;
};

}  // namespace

void bind_experts(nb::module_& m) {
  nb::class_<Experts>(m, "Experts")
      .def(nb::init<const std::vector<nb::object>&, const std::vector<nb::object>&, const std::optional<In<float, 2>>&,
                    const std::optional<In<float, 2>>&, int, bool>(),
           nb::arg(), nb::arg(), nb::arg().none(), nb::arg().none(), nb::arg(), nb::arg());
  nb::class_<ExpertKernels>(m, "ExpertKernels")
      .def(nb::init<const std::string&, const std::string&>())
      .def("route", &ExpertKernels::route, nb::arg(), nb::arg(), nb::arg().none(), nb::arg())
      .def("add", &ExpertKernels::add);
}

}  // namespace penstock
