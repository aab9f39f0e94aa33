// Low-rank adapters (LoRA, arXiv:2106.09685) of a step: what a row's own adapter adds to a product.
//
//     slots       row 0: 2   row 1: none   row 2: 0   row 3: 2
//     rows        2 | 0 3                                         sorted by slot, then by row; a row without is not there
//     computed    up to kWindowRows rows at a time: gathered, one product down and one up for each part of each adapter
//     added       out[row, first:first + n] += scale * up (down x)
//
// A row's bits depend on it and its own adapter alone: products do not look at how many rows there are.
#pragma once

#include <vector>

#include "moe/routing.hpp"
#include "threads/arena.hpp"

namespace penstock {

// One pair of matrices: what it adds goes to columns [first, first + up.n).
struct AdapterPart {
  PackedView down;  // [r, K]
  PackedView up;    // [n, r]
  long first;
  float scale;
};

// A product that adapters can add to.
struct AdapterSite {
  long inputs;
  long outputs;
};

// What every slot adds at every site: nothing, or parts with columns of their own.
class AdapterTable {
 public:
  AdapterTable(std::vector<AdapterSite> sites, long slots)
      : sites_(std::move(sites)), slots_(slots), parts_(sites_.size() * static_cast<size_t>(slots)) {}

  long sites() const { return static_cast<long>(sites_.size()); }
  long slots() const { return slots_; }
  const AdapterSite& site(long site) const { return sites_[static_cast<size_t>(site)]; }
  std::vector<AdapterPart>& at(long slot, long site) { return parts_[place(slot, site)]; }
  const std::vector<AdapterPart>& at(long slot, long site) const { return parts_[place(slot, site)]; }

 private:
  size_t place(long slot, long site) const { return static_cast<size_t>(slot) * sites_.size() + static_cast<size_t>(site); }

  std::vector<AdapterSite> sites_;
  long slots_;
  std::vector<std::vector<AdapterPart>> parts_;
};

struct AdapterArgs {
  const void* x;         // compute [rows, inputs]
  const int32_t* slots;  // [rows]; below 0: no adapter
  long rows;
  const AdapterTable* table;
  long site;
  float* out;  // [rows, outputs]
};

// Keeps its memory from step to step.
class AdapterRun {
 public:
  AdapterRun(const Family& family, Compute compute) : family_(family), compute_(compute) {}

  void run(const AdapterArgs& args);

 private:
  static constexpr long kWindowRows = 256;

  void sort(const AdapterArgs& args);
  void window(const AdapterArgs& args, long begin, long end);

  const Family& family_;
  Compute compute_;
  std::vector<int32_t> rows_;  // with an adapter that adds something here, by slot
  std::vector<long> begin_;    // first of each slot, and of one more
  std::vector<long> next_;
  std::vector<LinearArgs> calls_;
  std::vector<AddPartArgs> sums_;
  Arena x_, narrow_, compute_rows_, wide_;
};

}  // namespace penstock
