#include <nanobind/stl/optional.h>

#include <optional>
#include <vector>

#include "python/shm_group_binding.hpp"

namespace penstock {
namespace {

// A batch of sequences that go on by one token at a time: its positions and its table of pages, which change in place.
class PyAdvancingPages {
 public:
  PyAdvancingPages(In<int32_t, 1> positions, In<int32_t, 2> table, long groups, long page_tokens)
      : positions_(std::move(positions)), table_(std::move(table)), groups_(groups), page_tokens_(page_tokens) {
    rows_ = dim(positions_, 0), columns_ = dim(table_, 1);
    require(groups >= 1 && page_tokens >= 1 && columns_ % groups == 0, "a table has as many columns for each group");
    require(rows_ >= 1 && dim(table_, 0) >= rows_, "each position has a row of the table");
    first_ = positions_.data()[0];
  }

  // The cells of the table that the sequences reach with their next tokens, as pairs of a place in the table and a page:
  // those whose token is the first one of a page, in every group of layers, whose tables stand side by side.  None if the
  // first sequence has not gone on by one token since the last call.
  std::optional<nb::bytes> begun() {
    if (positions_.data()[0] != first_ + 1) return std::nullopt;
    ++first_;
    const long own = columns_ / groups_;
    cells_.clear();
    for (long row = 0; row < rows_; ++row) {
      const int32_t position = positions_.data()[row];
      if (position % page_tokens_ != 0) continue;
      const long page = position / page_tokens_;
      require(position >= 0 && page < own, "a position outside of the table");
      for (long group = 0; group < groups_; ++group) {
        const long at = row * columns_ + group * own + page;
        cells_.push_back(static_cast<int32_t>(at));
        cells_.push_back(table_.data()[at]);
      }
    }
    return nb::bytes(reinterpret_cast<const char*>(cells_.data()), cells_.size() * sizeof(int32_t));
  }

 private:
  In<int32_t, 1> positions_;
  In<int32_t, 2> table_;
  long groups_, page_tokens_, rows_, columns_;
  int32_t first_;
  std::vector<int32_t> cells_;
};

}  // namespace

void bind_collectives(nb::module_& m) {
  nb::class_<PyAdvancingPages>(m, "AdvancingPages")
      .def(nb::init<In<int32_t, 1>, In<int32_t, 2>, long, long>())
      .def("begun", &PyAdvancingPages::begun);
  nb::class_<PyShmGroup>(m, "ShmGroup")
      .def(nb::init<Bytes, int, int, size_t, double>())
      .def_static("bytes_needed", &PyShmGroup::bytes_needed)
      .def("post", &PyShmGroup::post)
      .def("wait", &PyShmGroup::wait)
      .def("label", &PyShmGroup::label)
      .def("read", &PyShmGroup::read)
      .def("send", &PyShmGroup::send)
      .def("wait_sent", &PyShmGroup::wait_sent)
      .def("sent_label", &PyShmGroup::sent_label)
      .def("receive", &PyShmGroup::receive)
      .def("end", &PyShmGroup::end)
      .def("over", &PyShmGroup::over)
      .def("time_exchanges", &PyShmGroup::time_exchanges);
}

}  // namespace penstock
