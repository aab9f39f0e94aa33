// The Python face of quantized weights: packing, and the two operations that read them.
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "python/binding.hpp"
#include "python/quantized_weights.hpp"
#include "quantized/quantized_packing.hpp"

namespace penstock {
namespace {

void pack(const In<uint8_t, 2>& codes, int bits, const Out<uint8_t, 1>& to) {
  const long rows = dim(codes, 0), k = dim(codes, 1);
  require(rows % 16 == 0 && k % kUnitColumns == 0, "whole panels and units only");
  require(bits == 4 || bits == 5 || bits == 6 || bits == 8, "codes have 4, 5, 6 or 8 bits");
  require(dim(to, 0) == rows / 16 * (k / kUnitColumns) * 64 * bits, "codes do not fit");
  nb::gil_scoped_release released;
  pack_codes(codes.data(), rows, k, bits, to.data());
}

void pack_bytes(const In<uint8_t, 2>& codes, const In<uint8_t, 1>& bytes, int bits, const Out<uint8_t, 1>& to) {
  const long rows = dim(codes, 0), k = dim(codes, 1);
  require(rows % 16 == 0 && k % kUnitColumns == 0, "whole panels and units only");
  require(bits == 4 || bits == 5 || bits == 6 || bits == 8, "codes have 4, 5, 6 or 8 bits");
  require(dim(bytes, 0) == 256, "a byte for every code");
  require(dim(to, 0) == rows / 16 * (k / kUnitColumns) * 64 * bits, "codes do not fit");
  nb::gil_scoped_release released;
  pack_quads(codes.data(), bytes.data(), rows, k, bits, to.data());
}

class QuantKernels {
 public:
  QuantKernels(const std::string& family, const std::string& compute)
      : family_(quantized_family(family.c_str())), compute_(compute == "bf16" ? Compute::kBf16 : Compute::kFp32) {
    require(compute == "bf16" || compute == "fp32", "the compute type must be bf16 or fp32");
  }

  void linear(const AnyIn& x, const QuantWeights& w, const Out<float, 2>& out, bool add) const {
    const size_t size = compute_ == Compute::kBf16 ? 2 : 4;
    require(x.ndim() == 2 && dim(x, 1) == w.layout.k && x.itemsize() == size, "x must be compute [T, K]");
    require(dim(out, 0) == dim(x, 0) && dim(out, 1) == w.layout.n, "out must be [T, N]");
    const QuantLinearArgs args{x.data(), dim(x, 0), w.view(), out.data(), add};
    without_gil([&] { family_.linear(args, compute_); });
  }

  void embed(const QuantWeights& table, const In<int32_t, 1>& tokens, const Out<float, 2>& out) const {
    require(dim(out, 0) == dim(tokens, 0) && dim(out, 1) == table.layout.k, "out must be [T, D]");
    require_ids(ids_of(tokens), table.layout.n, "token id outside the vocabulary");
    const QuantEmbedArgs args{table.view(), tokens.data(), dim(tokens, 0), out.data()};
    without_gil([&] { family_.embed(args); });
  }

 private:
  const QuantFamily& family_;
  Compute compute_;
};

}  // namespace

void bind_quantized(nb::module_& m) {
  m.def("pack_codes", &pack);
  m.def("pack_quads", &pack_bytes);
  nb::class_<QuantWeights>(m, "QuantWeights")
      .def(nb::init<long, long, const std::vector<long>&>())
      .def("add_part", &QuantWeights::add_part)
      .def("set_integers", &QuantWeights::set_integers)
      .def("set_order", &QuantWeights::set_order);
  nb::class_<QuantKernels>(m, "QuantKernels")
      .def(nb::init<const std::string&, const std::string&>())
      .def("linear", &QuantKernels::linear)
      .def("embed", &QuantKernels::embed);
}

}  // namespace penstock
