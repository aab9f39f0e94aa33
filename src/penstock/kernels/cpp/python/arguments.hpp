// What Python hands to the kernels, checked once: weights, KV memory, the step's tokens, how to draw.
//
// These objects keep the arrays alive that they point into.  Included by the binding only.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "attention/layer_places.hpp"
#include "gemm/packing.hpp"
#include "sampling/sampler.hpp"
#include "states/state_args.hpp"

namespace penstock {

namespace nb = nanobind;

template <class T, int N>
using In = nb::ndarray<const T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
template <class T, int N>
using Out = nb::ndarray<T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
using AnyIn = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;
using AnyOut = nb::ndarray<nb::c_contig, nb::device::cpu>;

inline void require(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(what);
}

template <class Array>
long dim(const Array& array, size_t axis) {
  return static_cast<long>(array.shape(axis));
}

inline Ids ids_of(const In<int32_t, 1>& array) { return {array.data(), dim(array, 0)}; }

inline void require_ids(const Ids& ids, long limit, const char* what) {
  for (long i = 0; i < ids.size; ++i) require(ids.data[i] >= 0 && ids.data[i] < limit, what);
}

// A packed weight over memory that Python owns (and this object keeps alive).
// Throws unless the outputs from first to stop of n are whole panels of 16.
inline void require_panels(long first, long stop, long n) {
  require(first >= 0 && first < stop && stop <= n && first % 16 == 0 && (stop % 16 == 0 || stop == n),
          "a part of a weight has whole panels of 16 outputs");
}

struct Weights {
  Out<uint32_t, 1> memory;
  PackedView view;

  Weights(Out<uint32_t, 1> cells, long n, long k, const std::vector<long>& ends, int per_cell)
      : memory(std::move(cells)), view(packed_layout(n, k, ends.data(), static_cast<int>(ends.size()), per_cell)) {
    require(dim(memory, 0) == view.panels() * view.steps() * 16, "memory does not fit the weight");
    view.cells = memory.data();
  }

  static long cells_needed(long n, long k, const std::vector<long>& ends, int per_cell) {
    const PackedView view = packed_layout(n, k, ends.data(), static_cast<int>(ends.size()), per_cell);
    return view.panels() * view.steps() * 16;
  }

  // The outputs from first to stop as a weight of their own, over the same memory; whole panels.
  Weights rows(long first, long stop) const {
    require_panels(first, stop, view.n);
    Weights part(*this);
    part.view.cells += first * view.steps();
    part.view.n = stop - first;
    return part;
  }

  // Outputs by inputs.
  void fill(const AnyIn& weight, const std::string& source) {
    const Source kind = source_of(weight, source, view.n, view.k);
    require(view.cells == memory.data(), "a part of a weight is filled with the whole");
    nb::gil_scoped_release released;
    pack_rows(weight.data(), kind, view, 0, view.n, memory.data());
  }

  // Inputs by outputs.
  void fill_turned(const AnyIn& weight, const std::string& source) {
    const Source kind = source_of(weight, source, view.k, view.n);
    require(view.cells == memory.data(), "a part of a weight is filled with the whole");
    nb::gil_scoped_release released;
    pack_columns(weight.data(), kind, view, memory.data());
  }

 private:
  static Source source_of(const AnyIn& weight, const std::string& source, long rows, long columns) {
    require(weight.ndim() == 2 && dim(weight, 0) == rows && dim(weight, 1) == columns, "weight has another shape");
    const bool wide = source == "fp32";
    require(wide || source == "fp16" || source == "bf16", "source must be bf16, fp16 or fp32");
    require(weight.itemsize() == (wide ? 4u : 2u), "elements have another size");
    return wide ? Source::kFp32 : source == "fp16" ? Source::kFp16 : Source::kBf16;
  }
};

// How a gated unit is computed, as Python says it; see Gate.
using GateWords = std::tuple<int, float, float, float, bool>;

inline Activation activation_of(int kind) {
  require(kind >= 0 && kind <= static_cast<int>(Activation::kNone), "no such activation");
  return static_cast<Activation>(kind);
}

inline Gate gate_of(const GateWords& words) {
  const auto& [kind, alpha, limit, shift, interleaved] = words;
  require(limit > 0, "the limit of a gate must be above 0");
  return {activation_of(kind), alpha, limit, shift, interleaved};
}

inline Form form_of(float scale, float cap) {
  require(cap >= 0, "the cap must be above 0");
  return {scale, cap};
}

// KV memory over a buffer that Python owns; a page has room for `layers` layers of one of `groups` groups, and for
// `page_heads` heads of a layer, of which `head_places` are this model's.
struct KvMemory {
  Out<uint32_t, 1> memory;
  std::vector<int32_t> head_places;
  KvView view;
  LayerPlaces places;
  StatesView states;

  KvMemory(Out<uint32_t, 1> cells, long pages, int layers, int kv_heads, int key_dim, int value_dim, bool shared,
           int per_cell, std::vector<std::pair<int, int>> layer_places, int groups, int page_heads,
           std::vector<int32_t> places_of_heads)
      : memory(std::move(cells)),
        head_places(std::move(places_of_heads)),
        view{memory.data(), pages,  layers,   kv_heads,   key_dim,
             value_dim,     shared, per_cell, page_heads, head_places.empty() ? nullptr : head_places.data()},
        places(std::move(layer_places), layers, groups) {
    require(pages > 0 && layers > 0 && kv_heads > 0 && groups > 0, "KV memory needs pages, layers and heads");
    require(head_places.empty() ? kv_heads == page_heads : head_places.size() == static_cast<size_t>(kv_heads),
            "every head needs a place in its page");
    for (const int32_t place : head_places) require(place >= 0 && place < page_heads, "a head has no place in its page");
    for (const int size : {key_dim, value_dim})
      require(size > 0 && size % 2 == 0 && size <= kMaxHeadDim, "head size must be even and at most 1024");
    require(!shared || value_dim <= key_dim, "shared values are columns of their keys");
    require(memory.size() == static_cast<size_t>(pages) * view.page_cells(), "memory does not fit the pages");
  }
  KvMemory(const KvMemory&) = delete;  // the view points into it

  // Some pages hold states of recurrent layers, given their number, heads of keys and values, their sizes, taps of the convolution,
  // tokens of a cell, rows of a page.
  void keep_states(const std::tuple<long, long, long, long, long, long, long, long>& sizes) {
    StatesView own;
    own.cells = memory.data();
    own.page_cells = static_cast<long>(view.page_cells());
    std::tie(own.layers, own.key_heads, own.heads, own.key_dim, own.value_dim, own.taps, own.cell_tokens,
             own.page_rows) = sizes;
    require(own.layers > 0 && own.key_heads > 0 && own.heads > 0 && own.heads % own.key_heads == 0,
            "states need layers, and heads that are a multiple of key heads");
    require(own.key_dim > 0 && own.key_dim % 2 == 0 && own.key_dim <= kMaxHeadDim, "key size must be even and at most 1024");
    require(own.value_dim > 0 && own.value_dim % 16 == 0 && own.value_dim <= kMaxHeadDim && own.channels() % 16 == 0,
            "value size and channels must be multiples of 16");
    require(own.taps >= 2 && own.taps <= kMaxTaps, "a convolution has 2 to 8 taps");
    require(own.cell_tokens > 0, "a cell has tokens");
    require(own.page_rows > 0 && own.page_rows * own.value_dim <= own.page_cells, "rows of states must fit a page");
    states = own;
  }
};

// A rotary table: cos and sin by position.
struct Rope {
  In<float, 3> table;
  std::optional<In<uint8_t, 1>> axes;
  RopeView view;
  long positions;

  Rope(In<float, 3> angles, bool interleaved, std::optional<In<uint8_t, 1>> axes_C2)
      : table(std::move(angles)),
        axes(std::move(axes_C2)),
        view{table.data(), dim(table, 2), interleaved, axes ? axes->data() : nullptr},
        positions(dim(table, 0)) {
    require(dim(table, 1) == 2 && view.pairs > 0 && 2 * view.pairs <= kMaxHeadDim,
            "the rope table must be [positions, 2, pairs]");
    require(!axes || dim(*axes, 0) == view.pairs, "an axis for every pair");
    for (long i = 0; axes && i < view.pairs; ++i) require(view.axes[i] < 3, "there are three axes");
  }
};

// Which keys attention sees and how scores become weights; 0 for a window, chunk, cap or limit that there is not.
struct AttentionRule {
  std::optional<In<float, 1>> sinks;
  KeyRule keys;
  Softmax softmax;

  // `sparse`: blocks of sinks, of the window and to choose, and where it starts.
  AttentionRule(float scale, long window, long chunk, float softcap, const std::optional<In<float, 1>>& sinks_H,
                long until, const std::optional<std::tuple<long, long, long, long>>& sparse)
      : sinks(sinks_H), keys{window, chunk, false, until}, softmax{scale, softcap, sinks ? sinks->data() : nullptr} {
    require(window >= 0 && chunk >= 0 && softcap >= 0 && until >= 0, "window, chunk, softcap and until must be above 0");
    require(until == 0 || (window == 0 && chunk == 0), "until goes with neither window nor chunk");
    if (!sparse) return;
    const auto [first, last, chosen, start] = *sparse;
    require(first > 0 && last > 0 && chosen > 0 && start >= 0, "sinks, window and chosen must be above 0");
    require(window == 0 && chunk == 0 && until == 0, "sparse attention has no window and no chunk beside its own");
    keys.sparse = {first, last, chosen, start};
  }

  void check(int heads) const { require(!sinks || dim(*sinks, 0) == heads, "a sink for every query head"); }
};

// The step's tokens, checked: positions in order, table entries inside the memory.
struct Batch {
  In<int32_t, 1> positions, starts;
  In<int32_t, 2> table;
  std::optional<In<int32_t, 2>> turns, states;
  BatchView view;
  std::vector<int32_t> sequence_of;
  long last_position = -1;
  long shortest = 0;  // positions, from 0 on, of the sequence that has the fewest

  Batch(In<int32_t, 1> positions_T, In<int32_t, 1> starts_S1, In<int32_t, 2> table_SP,
        std::optional<In<int32_t, 2>> turns_T3)
      : positions(std::move(positions_T)),
        starts(std::move(starts_S1)),
        table(std::move(table_SP)),
        turns(std::move(turns_T3)) {
    view = {positions.data(),   starts.data(),  table.data(),
            dim(positions, 0),  dim(starts, 0) - 1, dim(table, 1), turns ? turns->data() : nullptr};
    require(!turns || (dim(*turns, 0) == view.tokens && dim(*turns, 1) == 3), "turns must be [T, 3]");
    require(view.sequences >= 0 && dim(table, 0) >= view.sequences, "a table row for every sequence");
    sequence_of.resize(static_cast<size_t>(view.tokens));
    check();
  }

  // The arrays' content, which may have changed since.
  void check() {
    require(view.starts[0] == 0 && view.starts[view.sequences] == view.tokens, "starts must span all tokens");
    last_position = -1;
    shortest = std::numeric_limits<long>::max();
    for (long s = 0; s < view.sequences; ++s) check_sequence(s);
    // No axis is turned further than the position, so whatever reaches the last position reaches them too.
    for (long i = 0; turns && i < 3 * view.tokens; ++i)
      require(view.turns[i] >= 0 && view.turns[i] <= view.positions[i / 3], "a turn is 0 up to the position");
  }

  void check_sequence(long s) {
    require(view.starts[s] <= view.starts[s + 1] && view.starts[s + 1] <= view.tokens, "starts must ascend");
    for (long t = view.starts[s]; t < view.starts[s + 1]; ++t) {
      require(view.positions[t] >= 0, "positions start at 0");
      require(t == view.starts[s] || view.positions[t] == view.positions[t - 1] + 1, "positions must be consecutive");
      sequence_of[static_cast<size_t>(t)] = static_cast<int32_t>(s);
    }
    if (view.starts[s] == view.starts[s + 1]) return;
    const long last = view.positions[view.starts[s + 1] - 1];
    require(last / kPageTokens < view.table_width, "the table is too short for the last position");
    last_position = std::max(last_position, last);
    shortest = std::min(shortest, last + 1);
  }

  // Pages of the states of every sequence.
  void recur(In<int32_t, 2> states_SW) {
    require(dim(states_SW, 0) >= view.sequences, "pages of states for every sequence");
    states = std::move(states_SW);
  }

  StateTable state_table() const { return states ? StateTable{states->data(), dim(*states, 1)} : StateTable{}; }

  void check_states(const StatesView& kept, long pages) const {
    const StateTable table = state_table();
    for (long s = 0; s < view.sequences; ++s) {
      if (view.starts[s] == view.starts[s + 1]) continue;
      const long first = view.positions[view.starts[s]], last = view.positions[view.starts[s + 1] - 1];
      const long wanted = (last / kept.cell_tokens - kept.first_cell(first) + 1) * kept.parts();
      require(wanted <= table.width, "a step needs the pages of all states that it reads and writes");
      require_ids({table.pages + s * table.width, wanted}, pages, "page outside the memory");
    }
  }

  // The tables of all groups of layers, side by side.
  void check_pages(long pages, long groups) const {
    const long width = view.table_width / groups;
    require(width * groups == view.table_width, "a table of equal width for every group of layers");
    for (long s = 0; s < view.sequences; ++s) {
      if (view.starts[s] == view.starts[s + 1]) continue;
      const long blocks = view.positions[view.starts[s + 1] - 1] / kPageTokens + 1;
      require(blocks <= width, "the table is too short for the last position");
      for (long group = 0; group < groups; ++group)
        require_ids({view.table + s * view.table_width + group * width, blocks}, pages, "page outside the memory");
    }
  }
};

struct DrawRow {
  Draw how;
  std::vector<In<int32_t, 1>> ids;
  In<float, 1> bias;
  In<uint32_t, 1> allowed;

  DrawRow(uint64_t seed, uint32_t position, uint32_t choice, float temperature, std::optional<long> top_k, float top_p,
          float min_p, std::optional<int> logprobs) {
    how.seed = seed;
    how.position = position;
    how.choice = choice;
    how.temperature = temperature;
    how.top_k = top_k.value_or(0);
    how.top_p = top_p;
    how.min_p = min_p;
    how.logprobs = logprobs.value_or(-1);
  }

  void penalise(float presence, float frequency, float repetition, In<int32_t, 1> output, In<int32_t, 1> counts,
                In<int32_t, 1> prompt) {
    require(dim(output, 0) == dim(counts, 0), "a count for every output id");
    how.presence = presence;
    how.frequency = frequency;
    how.repetition = repetition;
    how.output = ids_of(output);
    how.output_counts = ids_of(counts);
    how.prompt = ids_of(prompt);
    ids.insert(ids.end(), {output, counts, prompt});
  }

  void set_bias(In<int32_t, 1> bias_ids, In<float, 1> values) {
    require(dim(bias_ids, 0) == dim(values, 0), "a value for every biased id");
    how.bias = ids_of(bias_ids);
    how.bias_values = values.data();
    ids.push_back(bias_ids);
    bias = values;
  }

  void ban(In<int32_t, 1> banned) {
    how.banned = ids_of(banned);
    ids.push_back(banned);
  }

  void allow(In<uint32_t, 1> words) {
    how.allowed = words.data();
    allowed = std::move(words);
  }

  void check(long vocabulary) const {
    for (const Ids& own : {how.output, how.prompt, how.bias, how.banned})
      require_ids(own, vocabulary, "token id outside the vocabulary");
    require(how.allowed == nullptr || dim(allowed, 0) == (vocabulary + 31) / 32, "a bit for every token, 32 a word");
  }
};

}  // namespace penstock
