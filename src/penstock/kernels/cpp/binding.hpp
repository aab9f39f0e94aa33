// What the parts of the Python binding share.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <mutex>
#include <stdexcept>

namespace penstock {

namespace nb = nanobind;

template <class T, int N>
using In = nb::ndarray<const T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
template <class T, int N>
using Out = nb::ndarray<T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
using AnyIn = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;
using AnyOut = nb::ndarray<nb::c_contig, nb::device::cpu>;

inline void require(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(what);
}

template <class Array>
long dim(const Array& array, size_t axis) {
  return static_cast<long>(array.shape(axis));
}

// One operation at a time in a process: the pool and its scratch memory are shared.
inline std::mutex one_operation;

template <class Fn>
void without_gil(const Fn& fn) {
  nb::gil_scoped_release released;
  const std::lock_guard<std::mutex> alone(one_operation);
  fn();
}

// Declares the functions and classes of compressed weights (module_compressed.cpp).
void bind_compressed(nb::module_& m);

}  // namespace penstock
