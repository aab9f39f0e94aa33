// The best token of a row, without its logits: each tile of the head offers what it has computed.
//
// Every offer is one number that orders values first and then lower ids, and the largest stays: so neither the order of
// the tiles nor their threads can matter.  The answer is that of argmax and gumbel_argmax over the row's logits.
#pragma once

#include "sampling/gumbel_noise.hpp"

namespace {

// See Form.
PS_INLINE F16 formed(const F16& value, const Form& form) {
  F16 to = value;
  if (form.scale != 1) to = to * splat(form.scale);
  if (form.cap != 0) to = splat(form.cap) * tanh16(to / splat(form.cap));
  return to;
}

// Larger for larger values, and for the lower of two ids of one value; never 0.  -0 counts as 0; not for NaN.
PS_INLINE uint64_t place_of(float value, int32_t id) {
  value += 0.0f;
  uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  const uint32_t order = (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(order) << 32 | static_cast<uint32_t>(~id);
}

PS_INLINE float value_at(uint64_t place) {
  const uint32_t order = static_cast<uint32_t>(place >> 32);
  const uint32_t bits = (order >> 31) != 0 ? order & 0x7FFFFFFFu : ~order;
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

PS_INLINE void keep_best(Pick& pick, uint64_t place) {
  uint64_t known = __atomic_load_n(&pick.best, __ATOMIC_RELAXED);
  while (place > known &&
         !__atomic_compare_exchange_n(&pick.best, &known, place, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}

// No logit below this can win: a bound that needs no division, a little low for the roundings it saves.
PS_INLINE float bound_of(const Pick& pick, uint64_t best) {
  if (best == 0) return -__builtin_inff();
  const float value = value_at(best);
  if (pick.greedy) return value;
  if (value > 3.4028234e38f) return 0.0f;  // only what is infinite, too, once it is divided
  const float bound = least_that_wins(value) * pick.temperature;
  return bound - (bound < 0 ? -bound : bound) * 1e-6f - 1e-30f;
}

// Sixteen logits, of which `set` may win: the best of them and `best`.
__attribute__((noinline)) uint64_t offer16(const Pick& pick, uint64_t best, const float* logits, int lanes, int32_t id, uint32_t set) {
  F16 value = load_part<F16>(logits, lanes);
  if (!pick.greedy) value = value / splat(pick.temperature) + gumbel16(pick.key, bits_as<U16>(iota(id)));
  alignas(64) float drawn[16];
  store(drawn, value);
  for (; set != 0; set &= set - 1) {
    const int lane = __builtin_ctz(set);
    const uint64_t place = place_of(drawn[lane], id + lane);
    if (place > best) best = place;
  }
  return best;
}

// Logits of tokens [first, first + count) of one row; noise is drawn only for those that can still win.
__attribute__((noinline)) void offer(Pick& pick, const float* logits, long first, long count) {
  const uint64_t known = __atomic_load_n(&pick.best, __ATOMIC_RELAXED);
  uint64_t best = known;
  F16 bound = splat(bound_of(pick, best));
  for (long i = 0; i < count; i += 16) {
    const int lanes = static_cast<int>(count - i < 16 ? count - i : 16);
    const uint32_t set = lanes_set(at_least(load_part<F16>(logits + i, lanes), bound)) & ((1u << lanes) - 1u);
    if (set == 0) continue;
    best = offer16(pick, best, logits + i, lanes, static_cast<int32_t>(first + i), set);
    bound = splat(bound_of(pick, best));
  }
  if (best != known) keep_best(pick, best);
}

}  // namespace
