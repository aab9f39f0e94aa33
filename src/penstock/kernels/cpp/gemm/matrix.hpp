// A weight, whatever its form.
#pragma once

#include "compressed/compressed.hpp"
#include "quantized/quantized.hpp"

namespace penstock {

struct Matrix {
  enum class Form : uint8_t { kPlain, kCompressed, kQuantized };
  Form form = Form::kPlain;
  PackedView plain{};
  CompressedView compressed{};
  QuantView quantized{};

  // The form that a product of `rows` rows reads; if plain, it reads layout().
  Form form_for(long rows) const {
    return form == Form::kCompressed && compressed.reads_copy(rows) ? Form::kPlain : form;
  }

  const PackedView& layout() const {
    return form == Form::kPlain ? plain : form == Form::kCompressed ? compressed.layout : quantized.layout;
  }
};

inline long outputs(const Matrix& matrix) { return matrix.layout().n; }
inline long inputs(const Matrix& matrix) { return matrix.layout().k; }

}  // namespace penstock
