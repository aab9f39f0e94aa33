// A weight, whatever its form.
#pragma once

#include "compressed.hpp"
#include "quantised.hpp"

namespace penstock {

struct Matrix {
  enum class Form : uint8_t { kPlain, kCompressed, kQuantised };
  Form form = Form::kPlain;
  PackedView plain{};
  CompressedView compressed{};
  QuantView quantised{};

  const PackedView& layout() const {
    return form == Form::kPlain ? plain : form == Form::kCompressed ? compressed.layout : quantised.layout;
  }
};

inline long outputs(const Matrix& matrix) { return matrix.layout().n; }
inline long inputs(const Matrix& matrix) { return matrix.layout().k; }

}  // namespace penstock
