// A weight, whatever its form.
#pragma once

#include "compressed.hpp"

namespace penstock {

struct Matrix {
  PackedView plain{};  // without cells when compressed
  CompressedView compressed{};
  bool is_compressed = false;
};

inline long outputs(const Matrix& matrix) { return matrix.is_compressed ? matrix.compressed.layout.n : matrix.plain.n; }
inline long inputs(const Matrix& matrix) { return matrix.is_compressed ? matrix.compressed.layout.k : matrix.plain.k; }

}  // namespace penstock
