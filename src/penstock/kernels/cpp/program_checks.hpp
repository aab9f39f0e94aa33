// What recording asks of matrices and of its caller.
#pragma once

#include <stdexcept>

#include "program.hpp"

namespace penstock {

inline void expect(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(what);
}

inline long outputs(const Matrix& matrix) { return matrix.is_compressed ? matrix.compressed.layout.n : matrix.plain.n; }
inline long inputs(const Matrix& matrix) { return matrix.is_compressed ? matrix.compressed.layout.k : matrix.plain.k; }

}  // namespace penstock
