// Row by row, besides the norm of rows/elementwise.hpp: activations, biases, sums, and what changes rows in place.
//
// Nothing here looks at more than one row, and every lane is computed as every other.
#pragma once

#include "rows/elementwise.hpp"

namespace {

// --- activations ----------------------------------------------------------------------------------------------------

// Two vectors whose lanes lie in turn in 32 floats, of which `count` pairs are there.
PS_INLINE void load_pairs(const float* from, int count, F16& even, F16& odd) {
  alignas(64) float pair[2][16] = {};
  for (int i = 0; i < count; ++i) pair[0][i] = from[2 * i], pair[1][i] = from[2 * i + 1];
  even = load(pair[0]);
  odd = load(pair[1]);
}

template <class D, Activation kKind, bool kPlain>
void gate_rows(const GatedArgs& args) {
  using Value = typename D::Value;
  const Gate& how = args.gate;
  const double work = static_cast<double>(args.rows) * static_cast<double>(args.width) * 16;
  each_row(args.rows, args.width * 4, work, [&](long row, int) {
    const float* from = args.gate_up + row * 2 * args.width;
    Value* to = static_cast<Value*>(args.out) + row * args.width;
    const F16 alpha = splat(how.alpha), limit = splat(how.limit), lowest = splat(-how.limit);
    for (long i = 0; i < args.width; i += 16) {
      const int count = static_cast<int>(min_of(16, args.width - i));
      F16 gate, up;
      if (!kPlain && how.interleaved) {
        load_pairs(from + 2 * i, count, gate, up);
      } else {
        gate = load_part<F16>(from + i, count);
        up = load_part<F16>(from + args.width + i, count);
      }
      if (!kPlain) {
        gate = select(greater(gate, limit), limit, gate);
        up = select(greater(up, limit), limit, select(less(up, lowest), lowest, up)) + splat(how.shift);
      }
      store_values<D>(to + i, activated<kKind>(gate, alpha) * up, count);
    }
  });
}

template <class D>
void gated_typed(const GatedArgs& args) {
  const Gate& how = args.gate;
  const bool plain = !how.interleaved && how.shift == 0.0f && how.limit == __builtin_inff();
  with_activation(how.activation, [&]<Activation kKind>() {
    plain ? gate_rows<D, kKind, true>(args) : gate_rows<D, kKind, false>(args);
  });
}

template <class D>
void activate_typed(const ActivateArgs& args) {
  using Value = typename D::Value;
  const double work = static_cast<double>(args.rows) * static_cast<double>(args.width) * 16;
  with_activation(args.activation, [&]<Activation kKind>() {
    each_row(args.rows, args.width * 4, work, [&](long row, int) {
      const float* from = args.x + row * args.width;
      Value* to = static_cast<Value*>(args.out) + row * args.width;
      const F16 alpha = splat(args.alpha);
      for (long i = 0; i < args.width; i += 16) {
        const int count = static_cast<int>(min_of(16, args.width - i));
        store_values<D>(to + i, activated<kKind>(load_part<F16>(from + i, count), alpha), count);
      }
    });
  });
}

// --- norms ----------------------------------------------------------------------------------------------------------

// hidden += norm(x): the norm is finished, in fp32, before it is added.
void norm_add_rows(const NormAddArgs& args) {
  const double work = static_cast<double>(args.rows) * static_cast<double>(args.width) * 3;
  each_row(args.rows, args.width, work, [&](long row, int) {
    const float* x = args.x + row * args.width;
    float* to = args.hidden + row * args.width;
    const F16 inverse = inverse_rms(x, args.width, args.eps);
    for (long i = 0; i < args.width; i += 16) {
      const int count = static_cast<int>(min_of(16, args.width - i));
      const F16 normed = load_part<F16>(x + i, count) * inverse * load_part<F16>(args.weight + i, count);
      store_part(to + i, load_part<F16>(to + i, count) + normed, count);
    }
  });
}

// Sum over a row of what `fn` makes of sixteen values; lanes behind the end count as zero.
template <class Fn>
PS_INLINE float sum_row(const float* x, long width, const Fn& fn) {
  F16 sum[4] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
  for (long i = 0; i < width; i += 16) {
    const int count = static_cast<int>(min_of(16, width - i));
    const F16 made = fn(load_part<F16>(x + i, count));
    F16& own = sum[(i / 16) & 3];
    own = own + (count < 16 ? select(less(iota(0), splat_int(count)), made, splat(0.0f)) : made);
  }
  return sum_lanes((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

template <class D>
void layer_norm_typed(const LayerNormArgs& args) {
  using Value = typename D::Value;
  const double work = static_cast<double>(args.rows) * static_cast<double>(args.width) * 3;
  const float width = static_cast<float>(args.width);
  each_row(args.rows, args.width, work, [&](long row, int) {
    const float* x = args.hidden + row * args.width;
    Value* to = static_cast<Value*>(args.out) + row * args.width;
    const F16 mean = splat(sum_row(x, args.width, [](const F16& v) { return v; }) / width);
    const float variance = sum_row(x, args.width, [&](const F16& v) { return (v - mean) * (v - mean); }) / width;
    const F16 inverse = splat(1.0f / __builtin_sqrtf(variance + args.eps));
    for (long i = 0; i < args.width; i += 16) {
      const int count = static_cast<int>(min_of(16, args.width - i));
      F16 v = (load_part<F16>(x + i, count) - mean) * inverse * load_part<F16>(args.weight + i, count);
      if (args.bias != nullptr) v = v + load_part<F16>(args.bias + i, count);
      store_values<D>(to + i, v, count);
    }
  });
}

// --- in place -------------------------------------------------------------------------------------------------------

// fn(sixteen values, row, column, count) for all of x, in place.
template <class Fn>
PS_INLINE void change_rows(float* x, long rows, long width, const Fn& fn) {
  const double work = static_cast<double>(rows) * static_cast<double>(width);
  each_row(rows, width, work, [&](long row, int) {
    float* own = x + row * width;
    for (long i = 0; i < width; i += 16) {
      const int count = static_cast<int>(min_of(16, width - i));
      store_part(own + i, fn(load_part<F16>(own + i, count), row, i, count), count);
    }
  });
}

void add_bias_rows(const BiasArgs& args) {
  change_rows(args.x, args.rows, args.width, [&](const F16& v, long row, long i, int count) {
    const float* bias = args.bias + (args.which == nullptr ? 0 : args.which[row] * args.width);
    return v + load_part<F16>(bias + i, count);
  });
}

void add_rows(const AddArgs& args) {
  change_rows(args.to, args.rows, args.width, [&](const F16& v, long row, long i, int count) {
    return v + load_part<F16>(args.x + row * args.width + i, count);
  });
}

void add_part_rows(const AddPartArgs& args) {
  const F16 scale = splat(args.scale);
  const double work = static_cast<double>(args.count) * static_cast<double>(args.n) * 2;
  each_row(args.count, args.n, work, [&](long row, int) {
    const float* from = args.x + row * args.n;
    float* to = args.to + args.rows[row] * args.width + args.first;
    for (long i = 0; i < args.n; i += 16) {
      const int count = static_cast<int>(min_of(16, args.n - i));
      store_part(to + i, fma16(load_part<F16>(from + i, count), scale, load_part<F16>(to + i, count)), count);
    }
  });
}

void form_rows(const FormArgs& args) {
  change_rows(args.x, args.rows, args.width, [&](const F16& v, long, long, int) { return formed(v, args.form); });
}

}  // namespace
