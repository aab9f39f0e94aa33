// Activations of sixteen values, for kernels that hold gates in registers.
#pragma once

#include "families/family.hpp"
#include "families/math.hpp"

namespace {

using namespace penstock;

// x * Phi(x), exactly to fp32; Phi(x) = erfc(-x / sqrt 2) / 2.
PS_INLINE F16 gelu16(const F16& x) {
  const F16 size = bits_as<F16>(bits_as<U16>(x) & splat_word(0x7FFFFFFFu));
  const F16 half = splat(0.5f) * erfc16(size * splat(0.70710678f));
  return x * select(less(x, splat(0.0f)), half, splat(1.0f) - half);
}

// x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), as x times a logistic function.
PS_INLINE F16 gelu_tanh16(const F16& x) {
  const F16 inner = x * fma16(x * x, splat(0.0713548163f), splat(1.59576912f));
  return x / (splat(1.0f) + exp16(splat(0.0f) - inner));
}

template <Activation kKind>
PS_INLINE F16 activated(const F16& x, const F16& alpha) {
  const F16 zero = splat(0.0f);
  if constexpr (kKind == Activation::kNone) return x;
  if constexpr (kKind == Activation::kSilu) return x / (splat(1.0f) + exp16(zero - alpha * x));
  if constexpr (kKind == Activation::kGelu) return gelu16(x);
  if constexpr (kKind == Activation::kGeluTanh) return gelu_tanh16(x);
  const F16 positive = select(less(x, zero), zero, x);
  return kKind == Activation::kRelu ? positive : positive * positive;
}

// fn.operator()<kind>()
template <class Fn>
PS_INLINE void with_activation(Activation kind, const Fn& fn) {
  switch (kind) {
    case Activation::kSilu: return fn.template operator()<Activation::kSilu>();
    case Activation::kGelu: return fn.template operator()<Activation::kGelu>();
    case Activation::kGeluTanh: return fn.template operator()<Activation::kGeluTanh>();
    case Activation::kRelu: return fn.template operator()<Activation::kRelu>();
    case Activation::kRelu2: return fn.template operator()<Activation::kRelu2>();
    case Activation::kNone: return fn.template operator()<Activation::kNone>();
  }
}

}  // namespace
