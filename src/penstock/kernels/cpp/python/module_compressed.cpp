// The Python face of compressed weights: encoding, checking, decoding, and the two operations that read them.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <vector>

#include "compressed/codec.hpp"
#include "families/dispatch.hpp"
#include "python/binding.hpp"
#include "python/compressed_weights.hpp"

namespace penstock {
namespace {

using Words = In<uint16_t, 2>;

nb::object exponents_of(const Words& weight) {
  std::array<uint64_t, 256> counts;
  {
    nb::gil_scoped_release released;
    counts = count_exponents(weight.data(), weight.size());
  }
  nb::list result;
  for (const uint64_t count : counts) result.append(count);
  return result;
}

void encode_into(const Words& weight, int base, int step, const Out<uint8_t, 1>& blocks, const Out<uint8_t, 1>& escapes,
                 const Out<uint32_t, 1>& counts) {
  const ExponentCode code{base, step};
  require(is_sound(code), "no such exponent code");
  const long n = dim(weight, 0), k = dim(weight, 1), panels = (n + 15) / 16;
  require(n > 0 && k > 0, "a weight needs at least one row and one column");
  require(dim(blocks, 0) == panels * ((k + 3) / 4) * kBlockBytes && dim(counts, 0) == panels, "out has another size");
  nb::gil_scoped_release released;
  const std::array<uint64_t, 256> found = count_exponents(weight.data(), weight.size());
  uint64_t escaped = weight.size();
  for (int c = 1; c < 8; ++c) escaped -= found[static_cast<size_t>(base + step * c)];
  require(escapes.size() == escaped, "as many escape bytes as weights without a code");
  encode(weight.data(), n, k, code, blocks.data(), escapes.data(), counts.data());
}

class CompressedKernels {
 public:
  explicit CompressedKernels(const std::string& family)
      : family_(compressed_family(family.c_str())), plain_(find_family(family.c_str())) {
    require(plain_ != nullptr && family_.name != nullptr && family == family_.name, "this kernel family cannot run here");
  }

  bool in_registers() const { return family_.in_registers; }

  void linear(const In<uint16_t, 2>& x, const CompressedWeights& w, const Out<float, 2>& out, bool add) const {
    require(w.whole_blocks, "segments must end with a block");
    require(dim(x, 1) == w.view.layout.k, "x must be compute [T, K]");
    require(dim(out, 0) == dim(x, 0) && dim(out, 1) == w.view.layout.n, "out must be [T, N]");
    const CompressedView view = w.with_copy();
    const long rows = dim(x, 0);
    without_gil([&] {
      if (view.reads_copy(rows)) return plain_->linear({x.data(), rows, view.layout, out.data(), add}, Compute::kBf16);
      family_.linear({x.data(), rows, view, out.data(), add});
    });
  }

  void embed(const CompressedWeights& table, const In<int32_t, 1>& tokens, const Out<float, 2>& out) const {
    require(table.whole_blocks, "segments must end with a block");
    require(dim(out, 0) == dim(tokens, 0) && dim(out, 1) == table.view.layout.k, "out must be [T, D]");
    for (long t = 0; t < dim(tokens, 0); ++t)
      require(tokens.data()[t] >= 0 && tokens.data()[t] < table.view.layout.n, "token id outside the vocabulary");
    const CompressedEmbedArgs args{table.view, tokens.data(), dim(tokens, 0), out.data()};
    without_gil([&] { family_.embed(args); });
  }

  // Rows of panels [panel, ...) as many as `out` has; on the calling thread, concurrently with other operations.
  void decode(const CompressedWeights& w, long panel, const Out<uint16_t, 2>& out) const {
    const PackedView& layout = w.view.layout;
    const long rows = dim(out, 0), begin = panel * 16;
    require(panel >= 0 && begin + rows <= layout.n && dim(out, 1) == layout.k, "out must be [rows, K]");
    require(rows % 16 == 0 || begin + rows == layout.n, "whole panels only");
    nb::gil_scoped_release released;
    for (long p = panel; (p - panel) * 16 < rows; ++p)
      family_.decode_rows(w.view, p, out.data() + (p - panel) * 16 * layout.k);
  }

  // The cells of as many panels from `panel` on as `cells` has room for, as plain weights have them; otherwise as `decode`.
  void decode_cells(const CompressedWeights& w, long panel, const Out<uint32_t, 1>& cells) const {
    require(w.whole_blocks, "segments must end with a block");
    const long each = w.view.layout.steps() * 16, panels = each == 0 ? 0 : dim(cells, 0) / each;
    require(panel >= 0 && panels * each == dim(cells, 0) && panel + panels <= w.view.layout.panels(),
            "cells must be those of whole panels");
    nb::gil_scoped_release released;
    for (long p = 0; p < panels; ++p) family_.decode_cells(w.view, panel + p, cells.data() + p * each);
  }

 private:
  const CompressedFamily& family_;
  const Family* plain_;
};

}  // namespace

void bind_compressed(nb::module_& m) {
  m.def("count_exponents", &exponents_of);
  m.def("encode", &encode_into);
  nb::class_<CompressedWeights>(m, "CompressedWeights")
      .def(nb::init<In<uint8_t, 1>, In<uint8_t, 1>, const In<uint8_t, 2>&, long, long, const std::vector<long>&,
                    const std::optional<In<uint32_t, 1>>&>(),
           nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none() = nb::none())
      .def("counts_are", &CompressedWeights::counts_are)
      .def("rows", &CompressedWeights::rows)
      .def("keep_decoded", &CompressedWeights::keep_decoded)
      .def_prop_ro("is_part", &CompressedWeights::is_part)
      .def_prop_ro("decoded_from", &CompressedWeights::decoded_from)
      .def_ro("whole_blocks", &CompressedWeights::whole_blocks);
  nb::class_<CompressedKernels>(m, "CompressedKernels")
      .def(nb::init<const std::string&>())
      .def("in_registers", &CompressedKernels::in_registers)
      .def("linear", &CompressedKernels::linear)
      .def("embed", &CompressedKernels::embed)
      .def("decode", &CompressedKernels::decode)
      .def("decode_cells", &CompressedKernels::decode_cells);
}

}  // namespace penstock
