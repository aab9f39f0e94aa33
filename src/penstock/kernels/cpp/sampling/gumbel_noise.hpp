// The random numbers of sampling, sixteen tokens at a time.
//
// Gumbel noise: Philox4x32-10 (Salmon, Moraes, Dror, Shaw 2011) with counter (position, choice, token id, 0); u is the
// first word's upper 24 bits plus one half, times 2^-24; G = -log(-log u).  u is never rounded: near one its distance
// from one is used, so no draw is infinite.
#pragma once

#include "families/family.hpp"
#include "families/math.hpp"

namespace {

using namespace penstock;

// No noise exceeds this (the largest is 17.33), and a token that lies lower than the best by more cannot win.
constexpr float kMaxGumbel = 17.5f;

// The least value that may still reach `best` with its noise; the addition's rounding is allowed for.
PS_INLINE float least_that_wins(float best) {
  return best - (kMaxGumbel + (best < 0 ? -best : best) * 1e-6f);
}

typedef uint64_t WideReg __attribute__((vector_size(kWidth * 8)));

// First word of Philox4x32-10 for sixteen third counter words.
PS_INLINE U16 philox_first_word(const DrawKey& key, const U16& ids) {
  U16 c0 = splat_word(key.position), c1 = splat_word(key.choice), c2 = ids, c3 = splat_word(0);
  uint32_t k0 = key.seed_low, k1 = key.seed_high;
  for (int round = 0; round < 10; ++round) {
    U16 high0, low0, high2, low2;
    PS_EACH_PART {
      const WideReg a = __builtin_convertvector(c0.part[i], WideReg) * 0xD2511F53u;
      const WideReg b = __builtin_convertvector(c2.part[i], WideReg) * 0xCD9E8D57u;
      high0.part[i] = __builtin_convertvector(a >> 32, WordReg);
      low0.part[i] = __builtin_convertvector(a & 0xFFFFFFFFu, WordReg);
      high2.part[i] = __builtin_convertvector(b >> 32, WordReg);
      low2.part[i] = __builtin_convertvector(b & 0xFFFFFFFFu, WordReg);
    }
    c0 = high2 ^ c1 ^ splat_word(k0);
    c1 = low2;
    c2 = high0 ^ c3 ^ splat_word(k1);
    c3 = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return c0;
}

PS_INLINE F16 gumbel16(const DrawKey& key, const U16& ids) {
  const U16 v = philox_first_word(key, ids) >> 8;
  const U16 odd = v + v + splat_word(1);  // u = odd * 2^-25
  const F16 unit = splat(0x1p-25f);
  const F16 u = to_float(bits_as<I16>(odd)) * unit;
  const F16 rest = to_float(splat_int(1 << 25) - bits_as<I16>(odd)) * unit;  // 1 - u, exact where it is used
  const F16 far_log = log16(u);
  const F16 near_log = log_near_one(splat(0.0f) - rest, splat(0.0f));
  const F16 e = splat(0.0f) - select(less(u, splat(0.70710678f)), far_log, near_log);
  return splat(0.0f) - log16(e);
}

}  // namespace
