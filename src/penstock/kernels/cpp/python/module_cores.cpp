// penstock.kernels._native.CoreShare: this process's part in the lending of cores.
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "python/binding.hpp"
#include "threads/core_lending.hpp"
#include "threads/thread_pool.hpp"

namespace penstock {
namespace {

// Lines of 64 bytes: of one owner, its first seat, and how many seats; then the processors that go with them.
using Loan = std::tuple<long, long, int, std::vector<int>>;

class CoreShare {
 public:
  // `lines` is [lines, 16], shared by all processes that lend; `me` tells borrowers apart.
  CoreShare(Out<uint32_t, 2> lines, int me, const Loan& own, const std::vector<Loan>& loans)
      : lines_(std::move(lines)), own_(checked(own), line(std::get<1>(own)), std::get<2>(own)) {
    require(me >= 1 && me <= 255, "borrowers are numbered from 1 to 255");
    std::vector<Seat> seats;
    for (const Loan& loan : loans)
      for (int i = 0; i < std::get<2>(loan); ++i)
        seats.push_back({checked(loan), line(std::get<1>(loan) + i), static_cast<uint32_t>(me), std::get<3>(loan)});
    without_gil([&] { set_guests(std::move(seats)); });
  }
  ~CoreShare() { close(); }
  CoreShare(const CoreShare&) = delete;

  void lend() { own_.lend(); }

  void take() {
    nb::gil_scoped_release released;
    own_.take();
  }

  // No guests any more: the lines may go.
  void close() {
    if (std::exchange(closed_, true)) return;
    without_gil([] { set_guests({}); });
  }

 private:
  CoreLine* line(long index) const {
    require(dim(lines_, 1) == 16 && reinterpret_cast<uintptr_t>(lines_.data()) % 64 == 0, "lines must be [n, 16], aligned");
    require(index >= 0 && index < dim(lines_, 0), "no such line");
    return reinterpret_cast<CoreLine*>(lines_.data()) + index;
  }

  CoreLine* checked(const Loan& loan) const {
    const long seats = std::get<1>(loan), count = std::get<2>(loan);
    require(seats >= 0 && count >= 0 && seats + count <= dim(lines_, 0), "no such seats");
    return line(std::get<0>(loan));
  }

  Out<uint32_t, 2> lines_;
  OwnCores own_;
  bool closed_ = false;
};

}  // namespace

void bind_cores(nb::module_& m) {
  m.def("guest_seconds", &guest_seconds);
  nb::class_<CoreShare>(m, "CoreShare")
      .def(nb::init<Out<uint32_t, 2>, int, const Loan&, const std::vector<Loan>&>())
      .def("lend", &CoreShare::lend)
      .def("take", &CoreShare::take)
      .def("close", &CoreShare::close);
}

}  // namespace penstock
