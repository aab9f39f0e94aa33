// Adapters as Python hands them over, checked once.  Included by the binding only.
#pragma once

#include <tuple>
#include <utility>
#include <vector>

#include "lora/adapters.hpp"
#include "python/arguments.hpp"

namespace penstock {

constexpr long kMaxAdapterSlots = 4096;

// (down, up, first column, scale)
using AdapterWords = std::tuple<nb::object, nb::object, long, float>;

// A table over packed matrices that Python owns (and this object keeps alive).
struct Adapters {
  AdapterTable table;
  int per_cell;
  std::vector<std::vector<nb::object>> held;  // by slot

  Adapters(const std::vector<std::pair<long, long>>& sites, long slots, int cell)
      : table(sites_of(sites), checked_slots(slots)), per_cell(cell), held(static_cast<size_t>(slots)) {}

  void put(long slot, long site, const std::vector<AdapterWords>& words) {
    require(slot >= 0 && slot < table.slots() && site >= 0 && site < table.sites(), "no such slot or product");
    const AdapterSite& shape = table.site(site);
    std::vector<AdapterPart> parts;
    for (const auto& [down, up, first, scale] : words) {
      const Weights &narrow = nb::cast<const Weights&>(down), &wide = nb::cast<const Weights&>(up);
      require(narrow.view.per_cell == per_cell && wide.view.per_cell == per_cell,
              "the matrices were packed for the other compute type");
      require(narrow.view.k == shape.inputs && wide.view.k == narrow.view.n, "matrices must be [r, K] and [n, r]");
      require(first >= 0 && first + wide.view.n <= shape.outputs, "the columns must be columns of the product");
      for (const AdapterPart& before : parts)
        require(first >= before.first + before.up.n, "parts must follow one another");
      parts.push_back({narrow.view, wide.view, first, scale});
    }
    for (const AdapterWords& own : words) {
      held[static_cast<size_t>(slot)].push_back(std::get<0>(own));
      held[static_cast<size_t>(slot)].push_back(std::get<1>(own));
    }
    table.at(slot, site) = std::move(parts);
  }

  void clear(long slot) {
    require(slot >= 0 && slot < table.slots(), "no such slot");
    for (long site = 0; site < table.sites(); ++site) table.at(slot, site).clear();
    held[static_cast<size_t>(slot)].clear();
  }

 private:
  static std::vector<AdapterSite> sites_of(const std::vector<std::pair<long, long>>& shapes) {
    std::vector<AdapterSite> sites;
    for (const auto& [inputs, outputs] : shapes) {
      require(inputs > 0 && outputs > 0, "a product has inputs and outputs");
      sites.push_back({inputs, outputs});
    }
    return sites;
  }
  static long checked_slots(long slots) {
    require(slots > 0 && slots <= kMaxAdapterSlots, "1 to 4096 adapters can be in memory");
    return slots;
  }
};

}  // namespace penstock
