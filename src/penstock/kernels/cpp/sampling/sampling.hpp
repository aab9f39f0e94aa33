// The parts of sampling that walk over a whole vocabulary.
#pragma once

#include "gemm/gemm.hpp"
#include "sampling/gumbel_noise.hpp"

namespace {

Best argmax(const float* x, long n) {
  F16 top = splat(-__builtin_inff());
  for (long i = 0; i + 16 <= n; i += 16) top = max16(load(x + i), top);
  float highest = max_lanes(top);
  for (long i = n / 16 * 16; i < n; ++i) highest = x[i] > highest ? x[i] : highest;
  long at = 0;
  const F16 wanted = splat(highest);
  for (; at + 16 <= n; at += 16) {
    const uint32_t found = lanes_set(at_least(load(x + at), wanted));
    if (found != 0) return {highest, static_cast<int32_t>(at + __builtin_ctz(found))};
  }
  for (; at < n; ++at)
    if (x[at] >= highest) return {highest, static_cast<int32_t>(at)};
  return {highest, 0};
}

// Sum of e^(x - top): lanes over four chains, each emptied every 4096 values so that long sums stay exact.
float sum_exp(const float* x, long n, float top) {
  const F16 shift = splat(top);
  F16 total = splat(0.0f);
  for (long from = 0; from < n; from += 4096) {
    const long end = min_of(n, from + 4096);
    F16 sum[4] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
    for (long i = from; i < end; i += 16) {
      const int count = static_cast<int>(min_of(16, end - i));
      F16 e = exp16(load_part<F16>(x + i, count) - shift);
      if (count < 16) e = select(less(iota(0), splat_int(count)), e, splat(0.0f));
      F16& own = sum[(i / 16) & 3];
      own = own + e;
    }
    total = total + ((sum[0] + sum[1]) + (sum[2] + sum[3]));
  }
  return sum_lanes(total);
}

void exp_minus(const float* x, long n, float top, float* out) {
  for (long i = 0; i < n; i += 16) {
    const int count = static_cast<int>(min_of(16, n - i));
    store_part(out + i, exp16(load_part<F16>(x + i, count) - splat(top)), count);
  }
}

void divide(const float* x, long n, float by, float* out) {
  for (long i = 0; i < n; i += 16) {
    const int count = static_cast<int>(min_of(16, n - i));
    store_part(out + i, load_part<F16>(x + i, count) / splat(by), count);
  }
}

// Ids of values at or above `floor`, ascending; returns their number.
long collect(const float* x, long n, float floor, int32_t* ids) {
  long found = 0;
  for (long i = 0; i < n; i += 16) {
    const int count = static_cast<int>(min_of(16, n - i));
    uint32_t set = lanes_set(at_least(load_part<F16>(x + i, count), splat(floor))) & ((1u << count) - 1u);
    for (; set != 0; set &= set - 1) ids[found++] = static_cast<int32_t>(i + __builtin_ctz(set));
  }
  return found;
}

void gumbel(const DrawKey& key, const int32_t* ids, long n, float* out) {
  for (long i = 0; i < n; i += 16) {
    const int count = static_cast<int>(min_of(16, n - i));
    store_part(out + i, gumbel16(key, load_part<U16>(ids + i, count)), count);
  }
}

// Largest x + G among ids whose x is at least `floor`; `top` is the largest x.  Noise is drawn only where it can matter.
Best gumbel_argmax(const DrawKey& key, const float* x, long n, float floor, Best top) {
  Best best = top;
  gumbel(key, &top.id, 1, &best.value);
  best.value += top.value;
  const auto reachable = [&] {
    const float lowest = least_that_wins(best.value);
    return lowest > floor ? lowest : floor;
  };
  float least = reachable();
  for (long i = 0; i < n; i += 16) {
    const int count = static_cast<int>(min_of(16, n - i));
    const F16 value = load_part<F16>(x + i, count);
    uint32_t set = lanes_set(at_least(value, splat(least))) & ((1u << count) - 1u);
    if (set == 0) continue;
    alignas(64) float drawn[16];
    store(drawn, value + gumbel16(key, bits_as<U16>(iota(static_cast<int32_t>(i)))));
    for (; set != 0; set &= set - 1) {
      const int lane = __builtin_ctz(set);
      const int32_t id = static_cast<int32_t>(i + lane);
      if (drawn[lane] > best.value || (drawn[lane] == best.value && id < best.id)) best = {drawn[lane], id};
    }
    least = reachable();
  }
  return best;
}

float log_of(float x) {
  alignas(64) float lane[16];
  store(lane, log16(splat(x)));
  return lane[0];
}

}  // namespace
