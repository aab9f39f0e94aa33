// A compressed weight as Python hands it over, checked once.  Included by the binding only.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "compressed/codec.hpp"
#include "gemm/packing.hpp"
#include "python/arguments.hpp"

namespace penstock {

// What products of many rows read instead of a compressed weight: its cells, decoded once.
struct DecodedCopy {
  std::optional<Out<uint32_t, 1>> cells;
  long from = 0;  // rows
};

// A compressed weight over memory that Python owns.  `codes` are (base, step mod 256) a panel; `counted`, if given,
// are the escapes that a `WeightLoading` counted in the planes of each panel.
struct CompressedWeights {
  In<uint8_t, 1> blocks, escapes;
  std::vector<uint64_t> escape_begin;
  std::vector<PanelCode> codes;
  CompressedView view{};  // without the copy
  std::shared_ptr<DecodedCopy> copy = std::make_shared<DecodedCopy>();  // one for the weight and its parts
  long first_panel = 0;  // of the weight that this is a part of
  bool whole_blocks = true;  // every segment begins with a block, and inputs fill the last one

  CompressedWeights(In<uint8_t, 1> blocks_in, In<uint8_t, 1> escapes_in, const In<uint8_t, 2>& panel_codes, long n,
                    long k, const std::vector<long>& ends, const std::optional<In<uint32_t, 1>>& counted)
      : blocks(std::move(blocks_in)), escapes(std::move(escapes_in)) {
    view.layout = packed_layout(n, k, ends.data(), static_cast<int>(ends.size()), 2);
    const long panels = view.layout.panels();
    require(dim(blocks, 0) == panels * view.blocks_a_panel() * kBlockBytes, "blocks do not fit the weight");
    require(dim(panel_codes, 0) == panels && dim(panel_codes, 1) == 2, "a code for every panel");
    for (const long end : ends) whole_blocks = whole_blocks && end % kBlockColumns == 0;
    for (long p = 0; p < panels; ++p) {
      const ExponentCode code{panel_codes(p, 0), panel_codes(p, 1) == 1 ? 1 : -1};
      require((panel_codes(p, 1) == 1 || panel_codes(p, 1) == 255) && is_sound(code), "no such exponent code");
      codes.push_back(rotated(code));
    }
    view.blocks = blocks.data();
    view.escapes = escapes.data();
    view.codes = codes.data();
    escape_begin.resize(static_cast<size_t>(panels) + 1);
    if (counted) {
      require(dim(*counted, 0) == panels, "a count for every panel");
      for (size_t p = 0; p < codes.size(); ++p) escape_begin[p + 1] = escape_begin[p] + counted->data()[p];
    } else {
      nb::gil_scoped_release released;
      sum_escapes(view, escape_begin.data());
    }
    view.escape_begin = escape_begin.data();
    require(escapes.size() == escape_begin.back() + kEscapePadding, "the planes count other escapes than there are");
  }

  CompressedWeights(const CompressedWeights& other)
      : blocks(other.blocks), escapes(other.escapes), escape_begin(other.escape_begin), codes(other.codes),
        view(other.view), copy(other.copy), first_panel(other.first_panel), whole_blocks(other.whole_blocks) {
    view.escape_begin = escape_begin.data();
    view.codes = codes.data();
  }

  // The outputs from first to stop as a weight of their own, over the same memory; whole panels.
  CompressedWeights rows(long first, long stop) const {
    require_panels(first, stop, view.layout.n);
    const long begin = first / 16, end = (stop + 15) / 16;
    CompressedWeights part(*this);
    part.codes.assign(codes.begin() + begin, codes.begin() + end);
    part.escape_begin.assign(escape_begin.begin() + begin, escape_begin.begin() + end + 1);
    part.view.codes = part.codes.data();
    part.view.escape_begin = part.escape_begin.data();
    part.view.blocks += begin * view.blocks_a_panel() * kBlockBytes;
    part.view.layout.n = stop - first;
    part.first_panel += begin;
    return part;
  }

  // Is it some outputs of another weight?
  bool is_part() const {
    return view.blocks != blocks.data() || dim(blocks, 0) != view.layout.panels() * view.blocks_a_panel() * kBlockBytes;
  }

  // The weight with the copy that it has by now.
  CompressedView with_copy() const {
    CompressedView own = view;
    if (!copy->cells) return own;
    own.layout.cells = copy->cells->data() + first_panel * view.layout.steps() * 16;
    own.decoded_from = copy->from;
    return own;
  }

  // Products of `from` rows and more read `cells`, which `CompressedKernels.decode_cells` has filled; so do those of parts.
  // Once: steps that are recorded later hold on to the cells.
  void keep_decoded(Out<uint32_t, 1> cells, long from) {
    require(whole_blocks, "segments must end with a block");
    require(!is_part(), "the whole weight has a copy, not a part of it");
    require(from >= 1, "a copy is for products of one row and more");
    require(!copy->cells, "the weight has a copy already");
    require(dim(cells, 0) == view.layout.panels() * view.layout.steps() * 16, "cells do not fit the weight");
    copy->from = from;
    copy->cells = std::move(cells);
  }

  // Rows from which on products read the copy; none without one.
  std::optional<long> decoded_from() const {
    return copy->cells ? std::optional<long>(copy->from) : std::nullopt;
  }

  bool counts_are(const In<uint32_t, 1>& counts) const {
    if (dim(counts, 0) != view.layout.panels()) return false;
    for (size_t p = 0; p < codes.size(); ++p)
      if (escape_begin[p + 1] - escape_begin[p] != counts.data()[p]) return false;
    return true;
  }
};

}  // namespace penstock
