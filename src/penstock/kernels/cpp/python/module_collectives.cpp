#include "python/shm_group_binding.hpp"

namespace penstock {

void bind_collectives(nb::module_& m) {
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
