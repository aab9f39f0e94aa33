// penstock.kernels._native: the Python face of the kernels.  Checks every shape and index, then releases the GIL.
//
// Arrays are NumPy arrays: fp32 as float32, bf16 as uint16.  Outputs are given by the caller.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "amx/amx_family.hpp"
#include "families/dispatch.hpp"
#include "python/binding.hpp"
#include "python/sampling_results.hpp"
#include "sampling/philox.hpp"
#include "threads/thread_pool.hpp"

using namespace penstock;

namespace {

// One family and one compute type.
class Kernels {
 public:
  Kernels(const std::string& name, const std::string& compute)
      : family_(find_family(name.c_str())), compute_(compute == "bf16" ? Compute::kBf16 : Compute::kFp32) {
    require(family_ != nullptr, "this kernel family cannot run here");
    require(compute == "bf16" || compute == "fp32", "the compute type must be bf16 or fp32");
  }

  void linear(const AnyIn& x, const Weights& w, const Out<float, 2>& out, bool add) const {
    require(x.ndim() == 2 && dim(x, 1) == w.view.k && x.itemsize() == size(), "x must be compute [T, K]");
    require(w.view.per_cell == per_cell(), "the weight was packed for the other compute type");
    require(dim(out, 0) == dim(x, 0) && dim(out, 1) == w.view.n, "out must be [T, N]");
    const LinearArgs args{x.data(), dim(x, 0), w.view, out.data(), add};
    without_gil([&] { family_->linear(args, compute_); });
  }

  void embed(const Weights& table, const In<int32_t, 1>& tokens, const Out<float, 2>& out) const {
    require(dim(out, 0) == dim(tokens, 0) && dim(out, 1) == table.view.k, "out must be [T, D]");
    require(table.view.per_cell == per_cell(), "the weight was packed for the other compute type");
    require_ids(ids_of(tokens), table.view.n, "token id outside the vocabulary");
    const EmbedArgs args{table.view, tokens.data(), dim(tokens, 0), out.data()};
    without_gil([&] { family_->embed(args, compute_); });
  }

  void rms_norm(const In<float, 2>& hidden, const In<float, 1>& weight, float eps, const AnyOut& out) const {
    require(dim(weight, 0) == dim(hidden, 1), "weight must be [D]");
    check_out(out, hidden.size());
    const NormArgs args{hidden.data(), weight.data(), dim(hidden, 0), dim(hidden, 1), eps, out.data()};
    without_gil([&] { family_->rms_norm(args, compute_); });
  }

  void to_compute(const In<float, 1>& values, const AnyOut& out) const {
    check_out(out, values.size());
    family_->to_compute(values.data(), dim(values, 0), out.data(), compute_);
  }

  std::vector<Answer> sample(const In<float, 2>& logits, const std::vector<const DrawRow*>& rows) const {
    const long vocabulary = dim(logits, 1);
    require(dim(logits, 0) == static_cast<long>(rows.size()) && vocabulary > 0, "a row of logits for every draw");
    for (const DrawRow* row : rows) row->check(vocabulary);
    std::vector<Drawn> drawn;
    without_gil([&] { draw_rows(*family_, logits.data(), vocabulary, rows, drawn); });
    return answers_of(drawn);
  }

  std::vector<Answer> score_tokens(const In<float, 2>& logits, const In<int32_t, 1>& tokens, int top) const {
    const long vocabulary = dim(logits, 1);
    require(dim(logits, 0) == dim(tokens, 0), "a row of logits for every token");
    require_ids(ids_of(tokens), vocabulary, "token id outside the vocabulary");
    std::vector<Drawn> drawn(tokens.size());
    without_gil([&] {
      for_rows(dim(logits, 0), [&](long row) {
        drawn[static_cast<size_t>(row)] =
            score_token(*family_, logits.data() + row * vocabulary, vocabulary, tokens.data()[row], top);
      });
    });
    return answers_of(drawn);
  }

  void gumbel(uint64_t seed, uint32_t position, uint32_t choice, const In<int32_t, 1>& ids,
              const Out<float, 1>& out) const {
    require(dim(ids, 0) == dim(out, 0), "out must be as long as ids");
    const DrawKey key{static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32), position, choice};
    family_->gumbel(key, ids.data(), dim(ids, 0), out.data());
  }

  uint32_t read_cells(const In<uint32_t, 1>& cells) const {
    uint32_t result = 0;
    without_gil([&] { result = family_->read_cells(cells.data(), dim(cells, 0)); });
    return result;
  }

  double multiply(long repeats) const {
    double operations = 0;
    without_gil([&] { operations = family_->multiply(repeats, compute_); });
    return operations;
  }

  int per_cell() const { return compute_ == Compute::kBf16 ? 2 : 1; }

 private:
  size_t size() const { return compute_ == Compute::kBf16 ? 2 : 4; }

  void check_out(const AnyOut& out, size_t count) const {
    require(out.size() == count && out.itemsize() == size(), "out has another shape or type");
  }

  const Family* family_;
  Compute compute_;
};

}  // namespace

NB_MODULE(_native, m) {
  nb::set_leak_warnings(false);  // kernels and weights live until the process ends
  m.attr("VERSION") = kKernelVersion;
  m.attr("EMULATES_AMX") = kEmulatesAmx;
  m.def("families", [] {
    std::vector<std::string> names;
    for (const Family* family : usable_families()) names.emplace_back(family->name);
    return names;
  });
  m.def("set_threads", &set_threads, nb::arg("count"));
  m.def("thread_count", &thread_count);
  m.def("philox", [](uint64_t key, std::tuple<uint32_t, uint32_t, uint32_t, uint32_t> c) {
    const auto out = philox4x32_10({static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32)},
                                   {std::get<0>(c), std::get<1>(c), std::get<2>(c), std::get<3>(c)});
    return std::make_tuple(out[0], out[1], out[2], out[3]);
  });

  nb::class_<Weights>(m, "Weights")
      .def(nb::init<Out<uint32_t, 1>, long, long, const std::vector<long>&, int>())
      .def_static("cells_needed", &Weights::cells_needed)
      .def("rows", &Weights::rows)
      .def("fill", &Weights::fill)
      .def("fill_turned", &Weights::fill_turned);
  nb::class_<KvMemory>(m, "KvMemory")
      .def(nb::init<Out<uint32_t, 1>, long, int, int, int, int, bool, int, std::vector<std::pair<int, int>>, int, int,
                    std::vector<int32_t>>())
      .def("keep_states", &KvMemory::keep_states);
  nb::class_<Batch>(m, "Batch")
      .def(nb::init<In<int32_t, 1>, In<int32_t, 1>, In<int32_t, 2>, std::optional<In<int32_t, 2>>>(), nb::arg(),
           nb::arg(), nb::arg(), nb::arg().none())
      .def("recur", &Batch::recur);
  nb::class_<DrawRow>(m, "DrawRow")
      .def(nb::init<uint64_t, uint32_t, uint32_t, float, std::optional<long>, float, float, std::optional<int>>(),
           nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg(), nb::arg(), nb::arg().none())
      .def("penalise", &DrawRow::penalise)
      .def("set_bias", &DrawRow::set_bias)
      .def("ban", &DrawRow::ban)
      .def("allow", &DrawRow::allow);
  nb::class_<Kernels>(m, "Kernels")
      .def(nb::init<const std::string&, const std::string&>())
      .def("linear", &Kernels::linear)
      .def("embed", &Kernels::embed)
      .def("rms_norm", &Kernels::rms_norm)
      .def("to_compute", &Kernels::to_compute)
      .def("sample", &Kernels::sample)
      .def("score_tokens", &Kernels::score_tokens)
      .def("gumbel", &Kernels::gumbel)
      .def("read_cells", &Kernels::read_cells)
      .def("multiply", &Kernels::multiply);
  bind_attention(m);
  bind_compressed(m);
  bind_quantized(m);
  bind_rows(m);
  bind_states(m);
  bind_experts(m);
  bind_adapters(m);
  bind_program(m);
  bind_cores(m);
  bind_collectives(m);
  bind_loading(m);
  bind_pages(m);
  bind_blocks(m);
}
