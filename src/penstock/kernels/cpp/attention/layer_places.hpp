// Where layers lie in KV memory: in the pages of which group of layers, and at which place in them.
//
// The page table of a step has the tables of all groups side by side: kernels are given the one of the layer's group.
#pragma once

#include <stdexcept>
#include <utility>
#include <vector>

#include "attention/attention_args.hpp"

namespace penstock {

class LayerPlaces {
 public:
  // (group, place) of every layer, of `groups` groups; `page_layers` have room in a page.
  LayerPlaces(std::vector<std::pair<int, int>> places, int page_layers, int groups)
      : places_(std::move(places)), groups_(groups) {
    for (const auto& [group, place] : places_) {
      if (group < 0 || group >= groups_ || place < 0 || place >= page_layers)
        throw std::invalid_argument("a layer has no place in its page");
    }
  }

  long groups() const { return groups_; }
  bool has(int layer) const { return layer >= 0 && static_cast<size_t>(layer) < places_.size(); }
  int place(int layer) const { return places_[static_cast<size_t>(layer)].second; }

  // The step's tokens with the table of the layer's group; `table_width` stays the distance of its rows.
  BatchView of(const BatchView& batch, int layer) const {
    BatchView own = batch;
    own.table += places_[static_cast<size_t>(layer)].first * (batch.table_width / groups_);
    return own;
  }

 private:
  std::vector<std::pair<int, int>> places_;
  int groups_;
};

}  // namespace penstock
