// What the operations of recurrent layers are given: the states in pages of KV memory, and a struct of pointers each.
//
// Shapes use the letters of kernels/ops.py.  Nothing is checked here: the bindings have checked it all.
#pragma once

#include "attention/attention_args.hpp"

namespace penstock {

constexpr int kMaxTaps = 8;

// States of recurrent layers: in every layer a matrix [key_dim, value_dim] of each head, head after head, then the last
// taps - 1 inputs of a convolution, oldest first.  All of it is fp32 in rows of value_dim numbers, layer after layer.  A
// page has room for `page_rows` rows: part i of a state begins with row i * page_rows and has a page of its own.
struct StatesView {
  uint32_t* cells = nullptr;  // of the KV memory
  long page_cells = 0;        // from one page to the next
  long page_rows = 0;
  long layers = 0;  // 0: nothing is kept
  long key_heads = 0;
  long heads = 0;      // a multiple of key_heads
  long key_dim = 0;    // even
  long value_dim = 0;  // a multiple of 16, as is channels()
  long taps = 0;       // of the convolution
  long cell_tokens = 0;  // a page holds the state after the last computed token of this many positions

  PS_EVERYWHERE long keys() const { return key_heads * key_dim; }
  PS_EVERYWHERE long channels() const { return 2 * keys() + heads * value_dim; }
  PS_EVERYWHERE long matrix_rows() const { return heads * key_dim; }
  PS_EVERYWHERE long layer_rows() const {
    return matrix_rows() + ((taps - 1) * channels() + value_dim - 1) / value_dim;
  }
  PS_EVERYWHERE long parts() const { return (layers * layer_rows() + page_rows - 1) / page_rows; }
  // A row of the state whose parts lie in these pages.
  PS_EVERYWHERE float* row(const int32_t* pages, long index) const {
    uint32_t* page = cells + static_cast<size_t>(pages[index / page_rows]) * static_cast<size_t>(page_cells);
    return reinterpret_cast<float*>(page) + index % page_rows * value_dim;
  }
  // Where `count` rows from `first` on lie, each from `column` on.
  PS_EVERYWHERE void rows(const int32_t* pages, long first, long count, long column, float** to) const {
    for (long r = 0; r < count;) {
      float* place = row(pages, first + r) + column;
      const long left = page_rows - (first + r) % page_rows, end = r + left < count ? r + left : count;
      for (; r < end; ++r, place += value_dim) to[r] = place;
    }
  }
  // Of the cells that a step from `first` on reads and writes, the one that its tables begin with.
  PS_EVERYWHERE long first_cell(long first) const { return (first > 0 ? first - 1 : 0) / cell_tokens; }
};

// Pages of a step's states: of each sequence the parts of its first cell (see first_cell), of the next, and so on.
struct StateTable {
  const int32_t* pages = nullptr;  // [sequences, width]
  long width = 0;
};

struct StateStep {
  StatesView states;
  StateTable table;
  BatchView batch;
  long layer;
};

// silu of a convolution over time, channel by channel.
struct ConvArgs {
  const float* x;  // [tokens, width], of which the first channels are read
  long width;
  const float* weight;  // [taps, channels]
  StateStep step;
  float* out;  // [tokens, channels]
};

struct DeltaArgs {
  const float* qkv;    // [tokens, channels]
  const float* gates;  // [tokens, gate_width]; of head h column `beta` + h and column `decay` + h
  long gate_width;
  long beta;
  long decay;
  const float* rates;   // [heads]
  const float* shifts;  // [heads]
  StateStep step;
  float* out;  // [tokens, heads * value_dim]
};

// The norm of every group of columns, times silu of a gate.
struct GatedNormArgs {
  const float* x;  // [rows, width]
  long rows;
  long width;
  const float* gate;  // [rows, gate_width], from column `first` on
  long gate_width;
  long first;
  const float* weight;  // [group]
  long group;
  float eps;
  void* out;  // compute [rows, width]
};

// x times the logistic function of a gate.
struct SigmoidGatedArgs {
  const void* x;      // compute [rows, width]
  const float* gate;  // [rows, width]
  long rows;
  long width;
  void* out;  // compute [rows, width]
};

// to += x times the logistic function of its row's gate, in one rounding.
struct GatedAddArgs {
  float* to;
  const float* x;
  const float* gate;  // [rows]
  long rows;
  long width;
};

}  // namespace penstock
