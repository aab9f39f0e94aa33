// Recurrent layers (gated delta networks, arXiv:2412.06464): what is made of a token and of the state before it.
//
// One token after another, in fp32, whatever the cut into steps: a state that goes to its page and comes back loses no
// bit.  Columns of a head's matrix know nothing of each other, so an item is some columns of one head of one sequence.
#pragma once

#include "moe/experts.hpp"
#include "rows/rows.hpp"
#include "states/state_args.hpp"

namespace {

// 1 / (1 + exp(-x)).
PS_INLINE F16 sigmoid16(const F16& x) { return splat(1.0f) / (splat(1.0f) + exp16(splat(0.0f) - x)); }

// log(1 + exp(x)).
PS_INLINE F16 softplus16(const F16& x) {
  const F16 power = exp16(x);
  const F16 near = log_near_one(power, splat(0.0f)), far = log16(splat(1.0f) + power);
  return select(greater(x, splat(20.0f)), x, select(less(power, splat(0.41421f)), near, far));
}

// fn(first token, tokens, pages with the state before or null, pages that the state behind goes to) for the tokens of
// each cell that a sequence enters.
template <class Fn>
PS_INLINE void each_cell(const StateStep& step, long sequence, const Fn& fn) {
  const BatchView& batch = step.batch;
  const long begin = batch.starts[sequence], end = batch.starts[sequence + 1];
  if (begin == end) return;
  const StatesView& states = step.states;
  const long tokens = states.cell_tokens, parts = states.parts(), base = states.first_cell(batch.positions[begin]);
  const int32_t* pages = step.table.pages + sequence * step.table.width;
  for (long token = begin; token < end;) {
    const long position = batch.positions[token], cell = position / tokens;
    const long count = min_of(end - token, (cell + 1) * tokens - position);
    const int32_t* from = position == 0 ? nullptr : pages + ((position - 1) / tokens - base) * parts;
    fn(token, count, from, pages + (cell - base) * parts);
    token += count;
  }
}

// --- the convolution ------------------------------------------------------------------------------------------------

constexpr long kConvChannels = 128;  // of an item

// fn(i, sixteen of the inputs kept) for channels `first` + i below `first` + count; `back` 0 is the oldest.
template <class Fn>
PS_INLINE void each_kept(const StateStep& step, const int32_t* pages, long back, long first, long count, const Fn& fn) {
  const StatesView& states = step.states;
  const long begin = step.layer * states.layer_rows() + states.matrix_rows();
  for (long i = 0, at = back * states.channels() + first; i < count;) {
    const long column = at % states.value_dim, run = min_of(count - i, states.value_dim - column);
    float* kept = states.row(pages, begin + at / states.value_dim) + column;
    at += run;
    for (const long end = i + run; i < end; i += 16, kept += 16) fn(i, kept);
  }
}

void conv_channels(const ConvArgs& args, long sequence, long first, long count) {
  const StatesView& states = args.step.states;
  const long channels = states.channels(), kept = states.taps - 1;
  alignas(64) float before[kMaxTaps - 1][kConvChannels];
  each_cell(args.step, sequence, [&](long token, long tokens, const int32_t* from, const int32_t* to) {
    for (long j = 0; j < kept; ++j) {
      if (from == nullptr)
        for (long i = 0; i < count; i += 16) store(before[j] + i, splat(0.0f));
      else
        each_kept(args.step, from, j, first, count, [&](long i, const float* own) { store(before[j] + i, load(own)); });
    }
    for (; tokens > 0; --tokens, ++token) {
      const float* x = args.x + token * args.width + first;
      for (long i = 0; i < count; i += 16) {
        const float* weight = args.weight + first + i;
        const F16 now = load(x + i);
        F16 sum = load(before[0] + i) * load(weight);
        for (long j = 1; j < kept; ++j) {
          const F16 input = load(before[j] + i);
          sum = fma16(input, load(weight + j * channels), sum);
          store(before[j - 1] + i, input);
        }
        store(before[kept - 1] + i, now);
        sum = fma16(now, load(weight + kept * channels), sum);
        store(args.out + token * channels + first + i, activated<Activation::kSilu>(sum, splat(1.0f)));
      }
    }
    for (long j = 0; j < kept; ++j)
      each_kept(args.step, to, j, first, count, [&](long i, float* own) { store(own, load(before[j] + i)); });
  });
}

void causal_conv_all(const ConvArgs& args) {
  const StatesView& states = args.step.states;
  const long channels = states.channels(), blocks = (channels + kConvChannels - 1) / kConvChannels;
  const double work = static_cast<double>(args.step.batch.tokens) * static_cast<double>(channels * (states.taps + 16));
  each_item(args.step.batch.sequences * blocks, work, [&](long item, int) {
    const long first = item % blocks * kConvChannels;
    conv_channels(args, item / blocks, first, min_of(kConvChannels, channels - first));
  });
}

// --- the delta rule -------------------------------------------------------------------------------------------------

constexpr long kDeltaVectors = 4;  // sixteens of columns of an item: a head's part of the state stays in the first cache

struct DeltaToken {
  const float* q;  // [rows], normed and scaled
  const float* k;  // [rows], normed
  const float* v;
  float* out;
  F16 decay;
  F16 beta;
};

// One token and some columns of a head: rows of the state from one place to the other, which may be the same.  Even and
// odd rows are summed apart.
template <int kVectors>
PS_INLINE void delta_token(const float* const* from, float* const* to, long rows, const DeltaToken& token) {
  F16 sum[2][kVectors];
  for (int v = 0; v < kVectors; ++v) sum[0][v] = sum[1][v] = splat(0.0f);
  for (long r = 0; r < rows; r += 2)
    for (int odd = 0; odd < 2; ++odd) {
      const F16 k = splat(token.k[r + odd]);
      for (int v = 0; v < kVectors; ++v) sum[odd][v] = fma16(k, load(from[r + odd] + v * 16), sum[odd][v]);
    }
  F16 delta[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    delta[v] = (load(token.v + v * 16) - token.decay * (sum[0][v] + sum[1][v])) * token.beta;
    sum[0][v] = sum[1][v] = splat(0.0f);
  }
  for (long r = 0; r < rows; r += 2)
    for (int odd = 0; odd < 2; ++odd) {
      const F16 k = splat(token.k[r + odd]), q = splat(token.q[r + odd]);
      for (int v = 0; v < kVectors; ++v) {
        const F16 state = fma16(k, delta[v], token.decay * load(from[r + odd] + v * 16));
        store(to[r + odd] + v * 16, state);
        sum[odd][v] = fma16(q, state, sum[odd][v]);
      }
    }
  for (int v = 0; v < kVectors; ++v) store(token.out + v * 16, sum[0][v] + sum[1][v]);
}

// x times `scale`, brought to length 1 before.
PS_INLINE void normed(const float* x, long width, float scale, float* out) {
  const float squares = sum_row(x, width, [](const F16& v) { return v * v; });
  const F16 inverse = splat(1.0f / __builtin_sqrtf(squares + 1e-6f)), by = splat(scale);
  for (long i = 0; i < width; i += 16) {
    const int count = static_cast<int>(min_of(16, width - i));
    store_part(out + i, load_part<F16>(x + i, count) * inverse * by, count);
  }
}

struct DeltaItem {
  long sequence;
  long head;
  long column;
};

template <int kVectors>
void delta_columns(const DeltaArgs& args, const DeltaItem& item, int worker) {
  const StatesView& states = args.step.states;
  const long rows = states.key_dim, width = kVectors * 16, channels = states.channels();
  const long first_row = args.step.layer * states.layer_rows() + item.head * rows;
  const long key_column = item.head / (states.heads / states.key_heads) * rows;
  const long value_column = item.head * states.value_dim + item.column;
  auto* scratch = static_cast<float*>(workspace(worker, static_cast<size_t>((rows + 1) * width) * sizeof(float)));
  float* zeros = scratch + rows * width;
  for (int v = 0; v < kVectors; ++v) store(zeros + v * 16, splat(0.0f));
  float *source[kMaxHeadDim], *inner[kMaxHeadDim], *target[kMaxHeadDim];
  for (long r = 0; r < rows; ++r) inner[r] = scratch + r * width;
  alignas(64) float q[kMaxHeadDim], k[kMaxHeadDim];
  const float scale = 1.0f / __builtin_sqrtf(static_cast<float>(rows));
  const F16 rate = splat(args.rates[item.head]), shift = splat(args.shifts[item.head]);
  each_cell(args.step, item.sequence, [&](long token, long tokens, const int32_t* from, const int32_t* to) {
    if (from == nullptr)
      for (long r = 0; r < rows; ++r) source[r] = zeros;
    else
      states.rows(from, first_row, rows, item.column, source);
    states.rows(to, first_row, rows, item.column, target);
    const float* const* now = source;
    for (; tokens > 0; --tokens, ++token) {
      const float* x = args.qkv + token * channels;
      const float* gates = args.gates + token * args.gate_width + item.head;
      normed(x + key_column, rows, scale, q);
      normed(x + states.keys() + key_column, rows, 1.0f, k);
      const F16 decay = exp16(splat(0.0f) - rate * softplus16(splat(gates[args.decay]) + shift));
      float* out = args.out + token * states.heads * states.value_dim + value_column;
      float* const* next = tokens == 1 ? target : inner;
      delta_token<kVectors>(now, next, rows,
                            {q, k, x + 2 * states.keys() + value_column, out, decay, sigmoid16(splat(gates[args.beta]))});
      now = next;
    }
  });
}

void delta_rule_all(const DeltaArgs& args) {
  const StatesView& states = args.step.states;
  const long vectors = states.value_dim / 16, blocks = (vectors + kDeltaVectors - 1) / kDeltaVectors;
  const double work = static_cast<double>(args.step.batch.tokens) * static_cast<double>(states.matrix_rows()) *
                      static_cast<double>(states.value_dim) * 3;
  each_item(args.step.batch.sequences * states.heads * blocks, work, [&](long index, int worker) {
    const long block = index % blocks, left = min_of(kDeltaVectors, vectors - block * kDeltaVectors);
    const DeltaItem item{index / blocks / states.heads, index / blocks % states.heads, block * kDeltaVectors * 16};
    switch (left) {
      case 1: return delta_columns<1>(args, item, worker);
      case 2: return delta_columns<2>(args, item, worker);
      case 3: return delta_columns<3>(args, item, worker);
      default: return delta_columns<4>(args, item, worker);
    }
  });
}

// --- gates ----------------------------------------------------------------------------------------------------------

template <class D>
void gated_norm_typed(const GatedNormArgs& args) {
  using Value = typename D::Value;
  const double work = static_cast<double>(args.rows) * static_cast<double>(args.width) * 20;
  each_row(args.rows, args.width * 4, work, [&](long row, int) {
    for (long group = 0; group < args.width; group += args.group) {
      const float* x = args.x + row * args.width + group;
      const float* gate = args.gate + row * args.gate_width + args.first + group;
      Value* to = static_cast<Value*>(args.out) + row * args.width + group;
      const F16 inverse = inverse_rms(x, args.group, args.eps);
      for (long i = 0; i < args.group; i += 16) {
        const int count = static_cast<int>(min_of(16, args.group - i));
        const F16 value = load_part<F16>(x + i, count) * inverse * load_part<F16>(args.weight + i, count);
        const F16 factor = activated<Activation::kSilu>(load_part<F16>(gate + i, count), splat(1.0f));
        store_values<D>(to + i, value * factor, count);
      }
    }
  });
}

template <class D>
void sigmoid_gated_typed(const SigmoidGatedArgs& args) {
  using Value = typename D::Value;
  const double work = static_cast<double>(args.rows) * static_cast<double>(args.width) * 16;
  each_row(args.rows, args.width * 4, work, [&](long row, int) {
    const Value* x = static_cast<const Value*>(args.x) + row * args.width;
    const float* gate = args.gate + row * args.width;
    Value* to = static_cast<Value*>(args.out) + row * args.width;
    for (long i = 0; i < args.width; i += 16) {
      const int count = static_cast<int>(min_of(16, args.width - i));
      store_values<D>(to + i, load_values(x + i, count) * sigmoid16(load_part<F16>(gate + i, count)), count);
    }
  });
}

void gated_add_rows(const GatedAddArgs& args) {
  change_rows(args.to, args.rows, args.width, [&](const F16& v, long row, long i, int count) {
    return fma16(load_part<F16>(args.x + row * args.width + i, count), sigmoid16(splat(args.gate[row])), v);
  });
}

}  // namespace
