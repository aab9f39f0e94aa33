// The Python face of adapters: the table of those in memory, and what they add to a product.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "families/dispatch.hpp"
#include "python/adapter_arguments.hpp"
#include "python/binding.hpp"

namespace penstock {
namespace {

// One family and one compute type.
class AdapterKernels {
 public:
  AdapterKernels(const std::string& name, const std::string& compute)
      : compute_(compute == "bf16" ? Compute::kBf16 : Compute::kFp32), run_(usable(name, compute), compute_) {}

  void add(const AnyIn& x, const In<int32_t, 1>& slots, const Adapters& adapters, long site, const Out<float, 2>& out) {
    const AdapterTable& table = adapters.table;
    require(site >= 0 && site < table.sites(), "no such product");
    const AdapterSite& shape = table.site(site);
    const long rows = dim(out, 0);
    require(adapters.per_cell == (compute_ == Compute::kBf16 ? 2 : 1), "the adapters were packed for the other compute type");
    require(x.ndim() == 2 && dim(x, 0) == rows && dim(x, 1) == shape.inputs && x.itemsize() == 4u / adapters.per_cell,
            "x must be compute [T, K]");
    require(dim(out, 1) == shape.outputs && dim(slots, 0) == rows, "out must be [T, N], with a slot for every row");
    for (long row = 0; row < rows; ++row) require(slots(row) < table.slots(), "no such slot");
    const AdapterArgs args{x.data(), slots.data(), rows, &table, site, out.data()};
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
  AdapterRun run_;
};

}  // namespace

void bind_adapters(nb::module_& m) {
  nb::class_<Adapters>(m, "Adapters")
      .def(nb::init<const std::vector<std::pair<long, long>>&, long, int>())
      .def("put", &Adapters::put)
      .def("clear", &Adapters::clear);
  nb::class_<AdapterKernels>(m, "AdapterKernels")
      .def(nb::init<const std::string&, const std::string&>())
      .def("add", &AdapterKernels::add);
}

}  // namespace penstock
