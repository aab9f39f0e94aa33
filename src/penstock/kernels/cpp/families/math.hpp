// exp, exp2, log, tanh and erfc on sixteen lanes: plain arithmetic in one fixed order, the same code for every lane and
// tail.
//
// Polynomials: minimax fits of exp (degree 6) and exp2 (degree 6); log after Cephes' logf.  Errors are within 2 ulp.
// tanh and erfc: fits at Chebyshev nodes, to 1e-7 of the value (erfc: of the exponent, so 3e-6 where it is 1e-10).
#pragma once

#include "families/simd.hpp"

namespace {

// value * 2^n for n from -126 to 127.
PS_INLINE F16 scale_by_power(const F16& value, const I16& n) {
  return value * bits_as<F16>(bits_as<U16>(n + splat_int(127)) << 23);
}

// The nearest integer, as a float, of |a| < 2^22.
PS_INLINE F16 nearest(const F16& a) {
  const F16 shift = splat(12582912.0f);
  return (a + shift) - shift;
}

// e^x: 0 below -87.3, infinity above 88.3; NaN stays NaN.
PS_INLINE F16 exp16(const F16& x) {
  const F16 low = splat(-87.3f), high = splat(88.3f);
  const F16 inside = select(less(x, low), low, select(greater(x, high), high, x));
  const F16 n = nearest(inside * splat(1.44269504f));
  F16 r = fma16(n, splat(-0.693359375f), inside);
  r = fma16(n, splat(2.12194440e-4f), r);
  F16 q = splat(0.0013926250394433737f);
  q = fma16(q, r, splat(0.00836323294788599f));
  q = fma16(q, r, splat(0.04166655242443085f));
  q = fma16(q, r, splat(0.16666576266288757f));
  q = fma16(q, r, splat(0.5f));
  const F16 near = fma16(q, r * r, r) + splat(1.0f);
  F16 y = scale_by_power(near, to_int(n));
  y = select(less(x, low), splat(0.0f), y);
  return select(greater(x, high), splat(__builtin_inff()), y);
}

// 2^x for x <= 0: 0 below -126 (so also for -infinity).
PS_INLINE F16 exp2_nonpositive(const F16& x) {
  const F16 low = splat(-126.0f);
  const F16 inside = max16(x, low);
  const F16 n = nearest(inside);
  const F16 f = inside - n;
  F16 p = splat(0.00015453163359779865f);
  p = fma16(p, f, splat(0.0013390863314270973f));
  p = fma16(p, f, splat(0.009618083015084267f));
  p = fma16(p, f, splat(0.055503569543361664f));
  p = fma16(p, f, splat(0.24022650718688965f));
  p = fma16(p, f, splat(0.6931471824645996f));
  const F16 y = scale_by_power(fma16(p, f, splat(1.0f)), to_int(n));
  return select(less(x, low), splat(0.0f), y);
}

// log(1 + x) for x from sqrt(1/2) - 1 to sqrt(2) - 1, plus e log 2.
PS_INLINE F16 log_near_one(const F16& x, const F16& e) {
  const F16 z = x * x;
  F16 p = splat(7.0376836292e-2f);
  p = fma16(p, x, splat(-1.1514610310e-1f));
  p = fma16(p, x, splat(1.1676998740e-1f));
  p = fma16(p, x, splat(-1.2420140846e-1f));
  p = fma16(p, x, splat(1.4249322787e-1f));
  p = fma16(p, x, splat(-1.6668057665e-1f));
  p = fma16(p, x, splat(2.0000714765e-1f));
  p = fma16(p, x, splat(-2.4999993993e-1f));
  p = fma16(p, x, splat(3.3333331174e-1f));
  F16 y = (p * x) * z;
  y = fma16(e, splat(-2.12194440e-4f), y);
  y = fma16(z, splat(-0.5f), y);
  return fma16(e, splat(0.693359375f), x + y);
}

// log(x) for normal x > 0.
PS_INLINE F16 log16(const F16& x) {
  const U16 bits = bits_as<U16>(x);
  I16 e = bits_as<I16>(bits >> 23) - splat_int(126);
  F16 m = bits_as<F16>((bits & splat_word(0x007FFFFFu)) | splat_word(0x3F000000u));  // in [0.5, 1)
  const Mask16 small = less(m, splat(0.70710678f));
  e = e + small;  // minus one where small
  m = select(small, m + m, m) - splat(1.0f);
  return log_near_one(m, to_float(e));
}

// tanh(x); NaN stays NaN.
PS_INLINE F16 tanh16(const F16& x) {
  const F16 z = x * x;
  F16 p = splat(-0.00593297126f);
  p = fma16(p, z, splat(0.0208813103f));
  p = fma16(p, z, splat(-0.0538258457f));
  p = fma16(p, z, splat(0.133326015f));
  p = fma16(p, z, splat(-0.333333273f));
  const F16 near = fma16(p * z, x, x);
  const F16 far = splat(1.0f) - splat(2.0f) / (exp16(x + x) + splat(1.0f));
  return select(less(z, splat(0.4225f)), near, far);  // |x| < 0.65
}

// 1 - erf(x) for x >= 0.
PS_INLINE F16 erfc16(const F16& x) {
  const F16 t = splat(1.0f) / fma16(x, splat(0.5f), splat(1.0f));
  F16 p = splat(0.14950329f);
  p = fma16(p, t, splat(-0.705712244f));
  p = fma16(p, t, splat(1.21522678f));
  p = fma16(p, t, splat(-0.773977406f));
  p = fma16(p, t, splat(-0.0161374744f));
  p = fma16(p, t, splat(-0.0327086381f));
  p = fma16(p, t, splat(0.0461129879f));
  p = fma16(p, t, splat(0.384244319f));
  p = fma16(p, t, splat(0.998909967f));
  p = fma16(p, t, splat(-1.26546154f));
  return t * exp16(p - x * x);
}

}  // namespace
