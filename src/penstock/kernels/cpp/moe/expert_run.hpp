// Routed experts of a step: rows go to their experts, and what these make of them is added to the hidden state.
//
//     routes      token 0: experts 5, 2    token 1: experts 2, 7
//     slots       (2, 0) (2, 1) (5, 0) (7, 1)         sorted by expert, then by token
//     computed    up to kWindowRows slots at a time: rows gathered, one product for each expert, activation, down
//     summed      each token's slots in this order within a group of experts, groups by a tree (routing.hpp); then
//                 added to its hidden state
//
// An expert without tokens is not read, one that another rank has is skipped.  A row's bits depend on its own experts alone: products do not look at how many
// rows there are, and the order of its sum follows from its experts' ids and the number of experts.
//
// Of a step with more than kWindowRows slots, sums wait between windows: at most pending_sums(top_k) <= 7 rows of fp32 a
// token, fewer than the products of its experts have.
#pragma once

#include <vector>

#include "gemm/matrix.hpp"
#include "moe/routing.hpp"
#include "threads/arena.hpp"

namespace penstock {

// The experts of one layer; all have one shape.
struct ExpertsView {
  long count;
  long inputs;   // K
  long inner;    // I
  long outputs;  // D
  const Matrix* gate_up;  // [count] of [2 I, K]
  const Matrix* down;     // [count] of [D, I]
  const float* gate_up_bias;  // [count, 2 I] or null
  const float* down_bias;     // [count, D] or null
  bool weighs_input;  // a token is multiplied by its weight before its expert, else after it

  // Another rank may have an expert: its matrices are not here, and it adds nothing.
  bool has(long expert) const { return down[expert].layout().n > 0; }
};

struct ExpertsArgs {
  const void* x;           // [rows, K]
  const uint32_t* routes;  // [rows, 2 * top_k]
  long rows;
  long top_k;
  ExpertsView experts;
  Gate gate;
  float* hidden;  // [rows, D]
};

// Keeps its memory from step to step.
class ExpertRun {
 public:
  ExpertRun(const Family& family, const CompressedFamily& compressed, Compute compute)
      : family_(family), compressed_(compressed), quantized_(quantized_family(family.name)), compute_(compute) {}

  void run(const ExpertsArgs& args);

 private:
  static constexpr long kWindowRows = 2048;

  void sort(const ExpertsArgs& args);
  void window(const ExpertsArgs& args, long begin, long end);
  void multiply(const Matrix* weights, long first, const char* x, float* out, const Gate* gate = nullptr);
  template <class T>
  T* room(Arena& arena, long rows, long width, size_t bytes) {
    return reinterpret_cast<T*>(arena.reserve(static_cast<size_t>(rows * width) * bytes));
  }

  const Family& family_;
  const CompressedFamily& compressed_;
  const QuantFamily& quantized_;
  Compute compute_;
  std::vector<int32_t> tokens_, experts_;  // of each slot
  std::vector<int32_t> slots_;             // of each token, ascending
  std::vector<float> weights_;             // of each slot
  std::vector<uint8_t> groups_;            // of each slot
  std::vector<long> begin_;                // first slot of each expert, and of one more
  std::vector<long> rows_;                 // of the present window, of each expert from its first on
  std::vector<LinearArgs> plain_;
  std::vector<CompressedLinearArgs> compact_;
  std::vector<QuantLinearArgs> coded_;
  Arena x_, wide_, active_, y_, pending_;
};

}  // namespace penstock
