// What the parts of the Python binding share.
#pragma once

#include <mutex>

#include "python/arguments.hpp"

namespace penstock {

// One operation at a time in a process: the pool and its scratch memory are shared.
inline std::mutex one_operation;

template <class Fn>
void without_gil(const Fn& fn) {
  nb::gil_scoped_release released;
  const std::lock_guard<std::mutex> alone(one_operation);
  fn();
}

// Declares the operations around attention (python/module_attention.cpp).
void bind_attention(nb::module_& m);

// Declares the functions and classes of compressed weights (python/module_compressed.cpp).
void bind_compressed(nb::module_& m);

// Declares the functions and classes of quantized weights (python/module_quantized.cpp).
void bind_quantized(nb::module_& m);

// Declares the operations that go row by row (python/module_rows.cpp).
void bind_rows(nb::module_& m);

// Declares the operations of recurrent layers (python/module_states.cpp).
void bind_states(nb::module_& m);

// Declares routed experts (python/module_experts.cpp); after weights and compressed weights.
void bind_experts(nb::module_& m);

// Declares adapters (python/module_adapters.cpp); after weights.
void bind_adapters(nb::module_& m);

// Declares recorded steps (python/module_program.cpp); after everything that they are made of.
void bind_program(nb::module_& m);

// Declares the class that lends and borrows cores (python/module_cores.cpp).
void bind_cores(nb::module_& m);

// Declares what moves arrays between the ranks of one host (python/module_collectives.cpp).
void bind_collectives(nb::module_& m);

// Declares what fills weights from files (python/module_loading.cpp).
void bind_loading(nb::module_& m);

// Declares what is done to pages as bytes (python/module_pages.cpp).
void bind_pages(nb::module_& m);

// Declares chains of hashes and the index of blocks (python/module_blocks.cpp).
void bind_blocks(nb::module_& m);

}  // namespace penstock
