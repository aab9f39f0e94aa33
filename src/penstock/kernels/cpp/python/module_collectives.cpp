#include "python/shm_group_binding.hpp"

namespace penstock {
namespace {

// The cells of a table of pages that sequences reach with their next tokens, as pairs of a place in the table and a page:
// those whose token is the first one of a page, in every group of layers, whose tables stand side by side.
nb::bytes begun_pages(const In<int32_t, 1>& positions, const In<int32_t, 2>& table, long groups, long page_tokens) {
  const long rows = dim(positions, 0), columns = dim(table, 1);
  require(groups >= 1 && page_tokens >= 1 && columns % groups == 0, "a table has as many columns for each group");
  require(dim(table, 0) >= rows, "each position has a row of the table");
  const long own = columns / groups;
  std::vector<int32_t> cells;
  for (long row = 0; row < rows; ++row) {
    const int32_t position = positions.data()[row];
    if (position % page_tokens != 0) continue;
    const long page = position / page_tokens;
    require(position >= 0 && page < own, "a position outside of the table");
    for (long group = 0; group < groups; ++group) {
      const long at = row * columns + group * own + page;
      cells.push_back(static_cast<int32_t>(at));
      cells.push_back(table.data()[at]);
    }
  }
  return nb::bytes(reinterpret_cast<const char*>(cells.data()), cells.size() * sizeof(int32_t));
}

}  // namespace

void bind_collectives(nb::module_& m) {
  m.def("begun_pages", &begun_pages);
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
