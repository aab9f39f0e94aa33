// The kernels without Python: runs every operation of the families that this processor has, on made-up data, with one
// thread and with several, and prints a checksum of each result.
//
// Fails when a checksum depends on the number of threads.  Built with the thread sanitizer it finds races; built for
// another processor its lines for the portable family must be those of this one (scripts/self-check does both).
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "attention/uncached_attention.hpp"
#include "compressed/codec.hpp"
#include "families/dispatch.hpp"
#include "gemm/packing.hpp"
#include "made_up.hpp"
#include "moe/expert_run.hpp"
#include "sampling/sampler.hpp"
#include "threads/thread_pool.hpp"

using namespace penstock;

namespace {

constexpr long kRows = 37, kWidth = 384, kOutputs = 400, kVocabulary = 3001;
constexpr int kHeads = 6, kKvHeads = 2, kHeadDim = 64, kLayers = 2, kMaxThreads = 4;

// Eight segments, one of them empty, all of whole blocks.
const std::vector<long> kEnds = {48, 96, 96, 192, 240, 288, 336, kWidth};

// Results of one run: a name and a checksum each.
using Results = std::vector<std::pair<std::string, uint64_t>>;

class Run {
 public:
  Run(const Family& family, Compute compute) : family_(family), compute_(compute) {}

  Results all() {
    rows_alone();
    products();
    attention();
    experts();
    sampling();
    if (compute_ == Compute::kBf16) compressed();
    return std::move(results_);
  }

 private:
  template <class T>
  void note(const char* what, const std::vector<T>& data) {
    Checksum sum;
    sum.add(data);
    results_.emplace_back(std::string(family_.name) + " " + name_of(compute_) + " " + what, sum.value);
  }

  std::vector<char> computed(const std::vector<float>& values) const {
    std::vector<char> made(values.size() * size_of(compute_));
    family_.to_compute(values.data(), static_cast<long>(values.size()), made.data(), compute_);
    return made;
  }

  void rows_alone() {
    const auto hidden = numbers(kRows * kWidth, 1, 1), weight = numbers(kWidth, 2, 1);
    note("to_compute", computed(hidden));
    std::vector<char> out(hidden.size() * size_of(compute_));
    family_.rms_norm({hidden.data(), weight.data(), kRows, kWidth, 0x1p-16f, out.data()}, compute_);
    note("rms_norm", out);
    family_.layer_norm({hidden.data(), weight.data(), weight.data(), kRows, kWidth, 0x1p-16f, out.data()}, compute_);
    note("layer_norm", out);
    for (const Activation kind : {Activation::kGelu, Activation::kGeluTanh, Activation::kRelu2}) {
      family_.activate({hidden.data(), kRows, kWidth, kind, 1, out.data()}, compute_);
      note("activate", out);
    }
    out.resize(out.size() / 2);
    for (const Gate& gate : {Gate{}, Gate{.alpha = 1.75f, .limit = 0.5f, .shift = 1, .interleaved = true}}) {
      family_.gated({hidden.data(), kRows, kWidth / 2, gate, out.data()}, compute_);
      note("gated", out);
    }
    auto changed = hidden;
    family_.norm_add({hidden.data(), weight.data(), kRows, kWidth, 0x1p-16f, changed.data()});
    family_.add_bias({changed.data(), weight.data(), nullptr, kRows, kWidth});
    family_.add({changed.data(), hidden.data(), kRows, kWidth});
    family_.form({changed.data(), kRows, kWidth, {0.75f, 2}});
    note("changed in place", changed);
  }

  void products() {
    const auto x = computed(numbers(kRows * kWidth, 3, 1));
    const Weight weight(numbers(kOutputs * kWidth, 4, 0.0625f), kOutputs, kWidth, kEnds, compute_);
    for (const long rows : {1L, 8L, kRows}) {
      std::vector<float> out(static_cast<size_t>(rows * kOutputs));
      family_.linear({x.data(), rows, weight.view, out.data(), false}, compute_);
      family_.linear({x.data(), rows, weight.view, out.data(), true}, compute_);
      note("linear", out);
    }
    picked(x, weight.view);
    const std::vector<int32_t> tokens = {5, 0, kOutputs - 1};
    std::vector<float> out(tokens.size() * kWidth);
    family_.embed({weight.view, tokens.data(), static_cast<long>(tokens.size()), out.data()}, compute_);
    note("embed", out);
  }

  // Tokens picked while panels are computed: greedy ones and drawn ones.
  void picked(const std::vector<char>& x, const PackedView& weight) {
    std::vector<Pick> picks(kRows);
    for (uint32_t row = 0; row < kRows; ++row) picks[row] = {0, {1, 2, row, 0}, 0.75f, row % 2 == 0};
    std::vector<float> out(kRows * kOutputs);
    family_.linear({x.data(), kRows, weight, out.data(), false, picks.data(), 0}, compute_);
    std::vector<uint64_t> best;
    for (const Pick& pick : picks) best.push_back(pick.best);
    note("picks", best);
  }

  // Routed experts, with the two halves of the weight as an expert's matrices.
  void experts() {
    constexpr long kExperts = 8, kInner = kOutputs / 2, kTopK = 3;
    const auto x = computed(numbers(kRows * kWidth, 30, 1));
    const auto logits = numbers(kRows * kExperts, 31, 2), bias = numbers(kExperts, 32, 0.25f);
    const Routing how{kExperts, kTopK, Score::kSigmoid, true, 4, 2, true, 2.5f, bias.data()};
    std::vector<uint32_t> routes(static_cast<size_t>(kRows * how.words()));
    family_.route({logits.data(), kRows, how, routes.data()});
    note("route", routes);
    std::vector<Weight> weights;
    for (uint64_t e = 0; e < kExperts; ++e) {
      weights.emplace_back(numbers(kOutputs * kWidth, 40 + e, 0.0625f), kOutputs, kWidth, kEnds, compute_);
      weights.emplace_back(numbers(kWidth * kInner, 60 + e, 0.0625f), kWidth, kInner, std::vector<long>{kInner}, compute_);
    }
    std::vector<Matrix> gate_up, down;
    for (size_t e = 0; e < weights.size(); ++e) (e % 2 == 0 ? gate_up : down).push_back({.plain = weights[e].view});
    const ExpertsView view{kExperts, kWidth, kInner, kWidth, gate_up.data(), down.data(), nullptr, nullptr, false};
    std::vector<float> hidden(kRows * kWidth);
    ExpertRun run(family_, compressed_family(family_.name), compute_);
    run.run({x.data(), routes.data(), kRows, kTopK, view, Gate{}, hidden.data()});
    note("experts", hidden);
    combined();
  }

  // Sums of nine of 200 experts a token: all slots in one call, and a few in each, or the program ends here.
  void combined() {
    constexpr long kExperts = 200, kTopK = 9, kSlots = kRows * kTopK;
    const auto y = numbers(kSlots * kWidth, 33, 1), weights = numbers(kSlots, 34, 1);
    std::vector<int32_t> slots(kSlots);
    std::vector<uint8_t> groups(kSlots);
    for (long row = 0; row < kRows; ++row)
      for (long j = 0; j < kTopK; ++j) {
        const long slot = j * kRows + row;
        slots[row * kTopK + j] = static_cast<int32_t>(slot);
        groups[slot] = static_cast<uint8_t>(group_of_expert(j * 22 + (j * row * 7 + row) % 22, kExperts));
      }
    std::vector<float> pending(kPendingSums * kRows * kWidth), whole;
    for (const long window : {kSlots, 1L, 50L}) {
      std::vector<float> hidden(kRows * kWidth);
      for (long begin = 0; begin < kSlots; begin += window) {
        const long end = begin + window < kSlots ? begin + window : kSlots;
        family_.combine({y.data() + begin * kWidth, begin, end, slots.data(), groups.data(), weights.data(), kRows, kTopK,
                         kWidth, pending.data(), hidden.data()});
      }
      if (whole.empty()) whole = hidden;
      if (hidden == whole) continue;
      std::printf("%s: experts were summed in another order in windows of %ld\n", family_.name, window);
      std::exit(1);
    }
    note("combined", whole);
  }

  // Two sequences, the second longer than a partition of keys; once with partitions joined apart.
  void attention() {
    const std::vector<int32_t> starts = {0, 30, 630};
    const long tokens = starts.back(), pages = 42, width = (kHeads + 2 * kKvHeads) * kHeadDim;
    std::vector<int32_t> positions(static_cast<size_t>(tokens)), sequence(positions.size()), table(2 * pages);
    for (long t = 0; t < tokens; ++t) sequence[t] = t >= starts[1], positions[t] = t - starts[sequence[t]];
    for (long i = 0; i < pages; ++i) table[i] = i < 2 ? 40 + i : 0, table[pages + i] = (i * 7 + 1) % 40;
    KvView kv{nullptr, pages, kLayers, kKvHeads, kHeadDim, kHeadDim, false, per_cell(compute_)};
    std::vector<uint32_t> memory(static_cast<size_t>(pages) * kv.page_cells());
    kv.cells = memory.data();
    const BatchView batch{positions.data(), starts.data(), table.data(), tokens, 2, pages};
    const auto qkv = numbers(static_cast<size_t>(tokens * width), 5, 0.5f), rope = numbers(640 * kHeadDim, 6, 0.25f);
    std::vector<char> q(static_cast<size_t>(tokens) * kHeads * kHeadDim * size_of(compute_));
    const RopeView angles{rope.data(), kHeadDim / 2, false};
    family_.rope_and_write(
        {qkv.data(), angles, positions.data(), nullptr, sequence.data(), batch, kv, 1, kHeads, q.data()}, compute_);
    note("rope", q);
    note("pages", memory);
    attend(q, kv, batch, false);
    attend(q, kv, batch, true);
    attend_with(q, kv, batch, {100, 0}, {0.125f, 0, nullptr}, "window");
    const auto sinks = numbers(kHeads, 9, 1);
    attend_with(q, kv, batch, {70, 256}, {0.125f, 20, sinks.data()}, "window, chunk, softcap, sinks");
    latent(batch, sequence);
    once(qkv, angles, starts);
    far();
  }

  // The last tokens of a sequence with ten partitions of keys, so that some classes have two; apart if there are threads.
  void far() {
    constexpr long kKeys = 4700, kLast = 5, kPages = (kKeys + kPageTokens - 1) / kPageTokens;
    constexpr long kRow = (kHeads + 2 * kKvHeads) * kHeadDim;
    std::vector<int32_t> positions(kKeys), sequence(kKeys), table(kPages);
    std::iota(positions.begin(), positions.end(), 0);
    for (long i = 0; i < kPages; ++i) table[i] = static_cast<int32_t>(kPages - 1 - i);
    KvView kv{nullptr, kPages, kLayers, kKvHeads, kHeadDim, kHeadDim, false, per_cell(compute_)};
    std::vector<uint32_t> memory(static_cast<size_t>(kPages) * kv.page_cells());
    kv.cells = memory.data();
    const std::vector<int32_t> all = {0, kKeys}, last = {0, kLast};
    const auto qkv = numbers(kKeys * kRow, 16, 0.5f), angles = numbers(kKeys * kHeadDim, 17, 0.25f);
    const size_t token = kHeads * kHeadDim * size_of(compute_);
    std::vector<char> q(kKeys * token);
    const BatchView batch{positions.data(), all.data(), table.data(), kKeys, 1, kPages};
    family_.rope_and_write({qkv.data(), {angles.data(), kHeadDim / 2, false}, positions.data(), nullptr, sequence.data(),
                            batch, kv, 1, kHeads, q.data()},
                           compute_);
    q.erase(q.begin(), q.end() - static_cast<long>(kLast * token));
    const BatchView tail{positions.data() + kKeys - kLast, last.data(), table.data(), kLast, 1, kPages};
    attend_with(q, kv, tail, {0, 0}, {0.125f, 0, nullptr}, "attention to ten partitions");
    attend_with(q, kv, tail, {1500, 0}, {0.125f, 0, nullptr}, "attention to four partitions");
  }

  // Both ways and without a cache: all, a window, near and far biases.
  void once(const std::vector<float>& qkv, const RopeView& angles, const std::vector<int32_t>& starts) {
    constexpr long kReach = 40;
    const auto biases = numbers(kHeads * (2 * kReach + 1), 15, 1);
    std::vector<char> out(static_cast<size_t>(starts.back()) * kHeads * kHeadDim * size_of(compute_));
    AttentionOnce attention;
    for (const long window : {0L, 100L}) {
      const BiasView bias{window == 0 ? biases.data() : nullptr, kReach};
      attention.run(family_, compute_,
                    {qkv.data(), angles, nullptr, starts.data(), 2, kHeads, kKvHeads, kHeadDim, {window, 0, true},
                     {0.125f, 0, nullptr}, bias, out.data()});
      note("attention both ways", out);
    }
  }

  // By any rule, cut as a step is.
  void attend_with(const std::vector<char>& q, const KvView& kv, const BatchView& batch, const KeyRule& rule,
                   const Softmax& softmax, const char* what) {
    AttentionCut cut;
    AttentionArgs args;
    cut.cut(kv, batch, kHeads, rule, args);
    args.q = q.data();
    args.layer = 1;
    args.softmax = softmax;
    std::vector<char> out(static_cast<size_t>(batch.tokens) * kHeads * kv.value_dim * size_of(compute_));
    args.out = out.data();
    family_.attention(args, compute_);
    note(what, out);
  }

  // Latent vectors of 40 numbers, of which 32 are values.
  void latent(const BatchView& batch, const std::vector<int32_t>& sequence) {
    constexpr int kDim = 40, kValues = 32, kPlain = 24, kTurned = kDim - kValues;
    KvView kv{nullptr, 42, kLayers, 1, kDim, kValues, true, per_cell(compute_)};
    std::vector<uint32_t> memory(static_cast<size_t>(kv.pages) * kv.page_cells());
    kv.cells = memory.data();
    const auto tokens = static_cast<size_t>(batch.tokens);
    const auto given = numbers(tokens * kDim, 10, 1), weight = numbers(kValues, 11, 1), angles = numbers(640 * kTurned, 12, 1);
    const RopeView rope{angles.data(), kTurned / 2, true};
    family_.latent_write({given.data(), weight.data(), 0x1p-16f, rope, sequence.data(), batch, kv, 1}, compute_);
    note("latent pages", memory);
    const auto queries = numbers(tokens * kHeads * (kPlain + kTurned), 13, 1);
    std::vector<char> x(tokens * kHeads * kPlain * size_of(compute_)), q(tokens * kHeads * kDim * size_of(compute_));
    family_.latent_split({queries.data(), rope, batch, kHeads, kPlain, x.data(), q.data(), kDim}, compute_);
    const Weight absorb(numbers(kHeads * kValues * kPlain, 14, 0.25f), kHeads * kValues, kPlain, {kPlain}, compute_);
    family_.heads_linear({x.data(), batch.tokens, kHeads, absorb.view, q.data(), kDim}, compute_);
    note("latent queries", q);
    attend_with(q, kv, batch, {0, 0}, {0.125f, 0, nullptr}, "latent attention");
  }

  void attend(const std::vector<char>& q, const KvView& kv, const BatchView& batch, bool apart) {
    constexpr long kTokens = 21, kGroup = kHeads / kKvHeads;
    AttentionArgs args{};
    std::vector<Chunk> chunks;
    for (long s = 0; s < batch.sequences; ++s)
      for (long t = batch.starts[s]; t < batch.starts[s + 1]; t += kTokens) {
        const long left = batch.starts[s + 1] - t, count = left < kTokens ? left : kTokens;
        const long parts = (batch.positions[t + count - 1] + kPartitionKeys) / kPartitionKeys;
        chunks.push_back({s, t, count, args.part_count, parts, 0});
        args.part_count += parts;
      }
    args.q = q.data();
    args.kv = kv;
    args.batch = batch;
    args.layer = 1;
    args.heads = kHeads;
    args.softmax = {0.125f, 0, nullptr};
    args.chunks = chunks.data();
    args.chunk_count = static_cast<long>(chunks.size());
    args.max_rows = kTokens * kGroup;
    args.work = 1e9;
    std::vector<float> partial(static_cast<size_t>(args.part_count * kKvHeads) * softmax_floats(args.max_rows, kHeadDim));
    args.partial = apart ? partial.data() : nullptr;
    std::vector<char> out(q.size());
    args.out = out.data();
    family_.attention(args, compute_);
    note("attention", out);
  }

  void sampling() {
    const auto logits = numbers(kVocabulary, 7, 2);
    std::vector<int32_t> drawn;
    std::vector<float> told;
    for (uint32_t position = 0; position < 64; ++position) {
      Draw how;
      how.seed = 11;
      how.position = position;
      how.temperature = position % 4 == 0 ? 0.0f : 0.75f;
      how.top_k = position % 3 == 0 ? 40 : 0;
      how.top_p = position % 2 == 0 ? 0.875f : 1.0f;
      how.logprobs = 3;
      const Drawn one = draw(family_, logits.data(), kVocabulary, how);
      drawn.push_back(one.token);
      told.push_back(one.logprob);
      for (const auto& [token, logprob] : one.top) drawn.push_back(token), told.push_back(logprob);
    }
    note("drawn", drawn);
    note("logprobs", told);
    std::vector<int32_t> ids(kVocabulary);
    std::iota(ids.begin(), ids.end(), 0);
    std::vector<float> noise(ids.size());
    family_.gumbel({1, 2, 3, 4}, ids.data(), kVocabulary, noise.data());
    note("gumbel", noise);
  }

  // The very products of plain weights, or the program ends here.
  void compressed() {
    const auto original = upper_halves(numbers(kOutputs * kWidth, 8, 0.0625f));
    const ExponentCode code{116, 1};
    const auto counted = count_exponents(original.data(), original.size());
    uint64_t escaped = original.size();
    for (int c = 1; c < 8; ++c) escaped -= counted[static_cast<size_t>(code.base + c)];
    CompressedView view{};
    view.layout = packed_layout(kOutputs, kWidth, kEnds.data(), static_cast<int>(kEnds.size()), 2);
    const auto panels = static_cast<size_t>(view.layout.panels());
    std::vector<uint8_t> blocks(panels * static_cast<size_t>(view.blocks_a_panel() * kBlockBytes));
    std::vector<uint8_t> escapes(escaped + kEscapePadding);
    std::vector<uint32_t> counts(panels);
    encode(original.data(), kOutputs, kWidth, code, blocks.data(), escapes.data(), counts.data());
    note("blocks", blocks);
    note("escapes", escapes);
    const std::vector<PanelCode> codes(panels, rotated(code));
    std::vector<uint64_t> begin(panels + 1);
    view.blocks = blocks.data();
    view.escapes = escapes.data();
    view.codes = codes.data();
    sum_escapes(view, begin.data());
    view.escape_begin = begin.data();
    multiply_compressed(view, original);
  }

  void multiply_compressed(const CompressedView& view, const std::vector<uint16_t>& original) {
    const CompressedFamily& kernels = compressed_family(family_.name);
    PackedView plain = view.layout;
    std::vector<uint32_t> cells(static_cast<size_t>(plain.panels() * plain.steps() * 16));
    pack_rows(original.data(), Source::kBf16, plain, 0, plain.n, cells.data());
    plain.cells = cells.data();
    const auto x = computed(numbers(kRows * kWidth, 3, 1));
    for (const long rows : {1L, 5L, kRows}) {
      std::vector<float> out(static_cast<size_t>(rows * kOutputs)), wanted(out.size());
      kernels.linear({x.data(), rows, view, out.data(), false});
      family_.linear({x.data(), rows, plain, wanted.data(), false}, compute_);
      note("compressed linear", out);
      if (std::memcmp(out.data(), wanted.data(), out.size() * 4) == 0) continue;
      std::printf("%s: compressed weights gave another product than plain ones (%ld rows)\n", family_.name, rows);
      std::exit(1);
    }
  }

  const Family& family_;
  Compute compute_;
  Results results_;
};

// Every item of many short calls is done once, while the number of threads changes.
bool pool_does_everything_once() {
  for (int call = 0; call < 6000; ++call) {
    set_threads(1 + call / 100 % kMaxThreads);
    std::vector<int> done(static_cast<size_t>(call % 23), 0);
    parallel(static_cast<long>(done.size()), &done, [](void* context, long item, int worker) {
      static_cast<unsigned char*>(workspace(worker, 4096))[item] = 1;
      ++(*static_cast<std::vector<int>*>(context))[static_cast<size_t>(item)];
    });
    for (const int times : done)
      if (times != 1) return false;
  }
  return true;
}

int check(const Family& family, Compute compute) {
  set_threads(1);
  const Results wanted = Run(family, compute).all();
  for (const auto& [what, sum] : wanted) std::printf("%s %016llx\n", what.c_str(), static_cast<unsigned long long>(sum));
  for (int threads = 2; threads <= kMaxThreads; ++threads) {
    set_threads(threads);
    if (Run(family, compute).all() == wanted) continue;
    std::printf("%s: %d threads gave other results than one\n", family.name, threads);
    return 1;
  }
  return 0;
}

}  // namespace

// Without arguments every family; with a name only that one.
int main(int count, char** words) {
  if (!pool_does_everything_once()) {
    std::puts("the pool did an item never, or twice");
    return 1;
  }
  int status = 0;
  for (const Family* family : usable_families())
    if (count < 2 || std::strcmp(words[1], family->name) == 0)
      for (const Compute compute : {Compute::kBf16, Compute::kFp32}) status |= check(*family, compute);
  return status;
}
