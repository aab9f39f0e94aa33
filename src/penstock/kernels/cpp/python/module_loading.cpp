// The Python face of loading: which bytes of which files become which weights.  Keeps the memory that it fills.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include "compressed/codec.hpp"
#include "host/weight_loader.hpp"
#include "python/binding.hpp"

namespace penstock {
namespace {

nb::bytes as_bytes(const Checksum& checksum) {
  return nb::bytes(reinterpret_cast<const char*>(checksum.data()), checksum.size());
}

class PyLoading {
 public:
  long add_tensor() { return loading_.add_tensor(); }

  void add_rows(long tensor, int file, uint64_t offset, nb::object weights, const std::string& source, long first,
                long rows) {
    const Weights& w = nb::cast<const Weights&>(weights);
    require(source == "bf16" || source == "fp16" || source == "fp32", "source must be bf16, fp16 or fp32");
    require(first >= 0 && rows > 0 && first + rows <= w.view.n, "rows outside the weight");
    const Source kind = source == "fp32" ? Source::kFp32 : source == "fp16" ? Source::kFp16 : Source::kBf16;
    loading_.add_rows(tensor, file, offset, w.view, w.memory.data(), kind, first, rows);
    kept_.append(std::move(weights));
  }

  void add_panels(long tensor, int file, uint64_t offset, const Out<uint8_t, 1>& blocks, long blocks_a_panel,
                  const Out<uint32_t, 1>& escapes) {
    require(blocks_a_panel > 0 && dim(blocks, 0) == dim(escapes, 0) * blocks_a_panel * kBlockBytes,
            "blocks and panels have other sizes");
    loading_.add_panels(tensor, file, offset, blocks.data(), dim(escapes, 0), blocks_a_panel, escapes.data());
    kept_.append(blocks);
    kept_.append(escapes);
  }

  void add_bytes(long tensor, int file, uint64_t offset, const Out<uint8_t, 1>& to) {
    loading_.add_bytes(tensor, file, offset, to.data(), to.size());
    kept_.append(to);
  }

  void add_decoded(long tensor, int file, uint64_t offset, nb::object weights, const std::string& family,
                   const std::pair<long, long>& row_and_column, const std::pair<long, long>& size,
                   const std::pair<int, int>& base_and_step, const Out<uint32_t, 1>& counts,
                   const Out<uint8_t, 1>& escapes) {
    const Weights& w = nb::cast<const Weights&>(weights);
    const PackedView& layout = w.view;
    const ExponentCode code{base_and_step.first, base_and_step.second};
    require(layout.per_cell == 2, "weights of bf16 only");
    for (int s = 0; s <= layout.segments; ++s)
      require(layout.k_begin[s] % kBlockColumns == 0, "segments must end with a block");
    const auto [row, column] = row_and_column;
    const auto [rows, columns] = size;
    require(row >= 0 && row % 16 == 0 && rows > 0 && row + rows <= layout.n, "rows outside the weight");
    require(rows % 16 == 0 || row + rows == layout.n, "whole panels only");
    require(column >= 0 && columns > 0 && column + columns <= layout.k, "columns outside the weight");
    require(column % kBlockColumns == 0 && columns % kBlockColumns == 0, "whole blocks only");
    require(is_sound(code), "no such exponent code");
    const DecodedMatrix matrix{layout, w.memory.data(), row, column, rows, columns, rotated(code),
                               compressed_family(family.c_str()).decode_cells, counts.data(), escapes.data(),
                               escapes.size() - kEscapePadding};
    require(dim(counts, 0) == matrix.panels() && dim(escapes, 0) >= kEscapePadding, "a count for every panel");
    loading_.add_decoded(tensor, file, offset, matrix);
    kept_.append(std::move(weights));
    kept_.append(counts);
    kept_.append(escapes);
  }

  void start(int threads) {
    nb::gil_scoped_release released;
    loading_.start(threads);
  }
  bool wait(double seconds) {
    nb::gil_scoped_release released;
    return loading_.wait(seconds);
  }
  void stop() {
    nb::gil_scoped_release released;
    loading_.stop();
  }

  std::optional<std::pair<long, std::string>> failure() const {
    const auto& failed = loading_.failure();
    if (failed == nullptr) return std::nullopt;
    return std::make_pair(failed->tensor, failed->reason);
  }
  uint64_t done_bytes() const { return loading_.done_bytes(); }
  uint64_t all_bytes() const { return loading_.bytes(); }
  nb::bytes checksum(long tensor, const std::string& text) const { return as_bytes(loading_.checksum(tensor, text)); }

 private:
  nb::list kept_;  // before the threads that write to it, so that it outlives them
  Loading loading_;
};

}  // namespace

void bind_loading(nb::module_& m) {
  m.attr("PIECE_BYTES") = kPieceBytes;
  nb::class_<PyLoading>(m, "Loading")
      .def(nb::init<>())
      .def("add_tensor", &PyLoading::add_tensor)
      .def("add_rows", &PyLoading::add_rows)
      .def("add_panels", &PyLoading::add_panels)
      .def("add_bytes", &PyLoading::add_bytes)
      .def("add_decoded", &PyLoading::add_decoded)
      .def("start", &PyLoading::start)
      .def("wait", &PyLoading::wait)
      .def("stop", &PyLoading::stop)
      .def("failure", &PyLoading::failure)
      .def("done_bytes", &PyLoading::done_bytes)
      .def("all_bytes", &PyLoading::all_bytes)
      .def("checksum", &PyLoading::checksum);
}

}  // namespace penstock
