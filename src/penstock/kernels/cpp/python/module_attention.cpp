// The Python face of the operations around attention.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include "attention/attention_partitions.hpp"
#include "attention/uncached_attention.hpp"
#include "families/dispatch.hpp"
#include "python/binding.hpp"
#include "threads/thread_pool.hpp"

namespace penstock {
namespace {

// One family and one compute type.
class AttentionKernels {
 public:
  AttentionKernels(const std::string& name, const std::string& compute)
      : family_(find_family(name.c_str())), compute_(compute == "bf16" ? Compute::kBf16 : Compute::kFp32) {
    require(family_ != nullptr, "this kernel family cannot run here");
    require(compute == "bf16" || compute == "fp32", "the compute type must be bf16 or fp32");
  }

  void norm_heads(const Out<float, 2>& x, const In<float, 1>& weight, float eps, long first, long count) const {
    const long group = dim(weight, 0);
    require(first >= 0 && count > 0 && group > 0 && first + count * group <= dim(x, 1),
            "the groups must be columns of x");
    without_gil([&] { family_->norm_heads({x.data(), dim(x, 0), dim(x, 1), weight.data(), group, eps, first, count}); });
  }

  void rope_and_write(const In<float, 2>& qkv, const Rope* rope, const std::optional<In<float, 1>>& q_scale,
                      const KvMemory& kv, int layer, const Batch& batch, int heads, const AnyOut& q) const {
    check_kv(kv, layer, batch, heads);
    const KvView& view = kv.view;
    require(!view.shared, "the KV memory holds latent vectors");
    require(dim(qkv, 0) == batch.view.tokens &&
                dim(qkv, 1) == (heads + view.kv_heads) * view.key_dim + view.kv_heads * view.value_dim,
            "qkv must be [T, (H + G) C + G value_dim]");
    if (rope != nullptr) {
      require(2 * rope->view.pairs <= view.key_dim, "the rope table has more columns than a head");
      require(rope->positions > batch.last_position, "the rope table must reach the last position");
    }
    require(!q_scale || dim(*q_scale, 0) > batch.last_position, "q_scale must reach the last position");
    check_out(q, static_cast<size_t>(batch.view.tokens * heads * view.key_dim));
    const RopeArgs args{qkv.data(),
                        rope == nullptr ? RopeView{} : rope->view,
                        batch.view.positions,
                        q_scale ? q_scale->data() : nullptr,
                        batch.sequence_of.data(),
                        kv.places.of(batch.view, layer),
                        view,
                        kv.places.place(layer),
                        heads,
                        q.data()};
    without_gil([&] { family_->rope_and_write(args, compute_); });
  }

  void latent_write(const In<float, 2>& latent, const In<float, 1>& weight, float eps, const Rope& rope,
                    const KvMemory& kv, int layer, const Batch& batch) const {
    check_kv(kv, layer, batch, 1);
    check_latent(kv.view, rope, batch);
    require(dim(latent, 0) == batch.view.tokens && dim(latent, 1) == kv.view.key_dim, "latent must be [T, C]");
    require(dim(weight, 0) == kv.view.value_dim, "weight must be [value_dim]");
    const LatentWriteArgs args{latent.data(), weight.data(), eps, rope.view, batch.sequence_of.data(),
                               kv.places.of(batch.view, layer), kv.view, kv.places.place(layer)};
    without_gil([&] { family_->latent_write(args, compute_); });
  }

  void latent_query(const In<float, 2>& q, const Weights& absorb, const Rope& rope, const KvMemory& kv,
                    const Batch& batch, long heads, const AnyOut& out) const {
    check_latent(kv.view, rope, batch);
    check_heads(absorb.view, heads, kv.view.value_dim);
    require(dim(q, 0) == batch.view.tokens && dim(q, 1) == heads * (absorb.view.k + 2 * rope.view.pairs),
            "q must be [T, H (K + rotated)]");
    check_out(out, static_cast<size_t>(batch.view.tokens * heads * kv.view.key_dim));
    without_gil([&] {
      void* x = shared_workspace(static_cast<size_t>(batch.view.tokens * heads * absorb.view.k) * size());
      family_->latent_split({q.data(), rope.view, batch.view, heads, absorb.view.k, x, out.data(), kv.view.key_dim}, compute_);
      family_->heads_linear({x, batch.view.tokens, heads, absorb.view, out.data(), kv.view.key_dim}, compute_);
    });
  }

  void heads_linear(const AnyIn& x, const Weights& weight, long heads, const AnyOut& out) const {
    const PackedView& view = weight.view;
    require(heads > 0 && view.n % heads == 0, "the weight's rows must be a multiple of heads");
    check_heads(view, heads, view.n / heads);
    const long rows = dim(x, 0);
    require(x.size() == static_cast<size_t>(rows * heads * view.k) && x.itemsize() == size(),
            "x must be compute [T, H, K]");
    check_out(out, static_cast<size_t>(rows * view.n));
    without_gil([&] { family_->heads_linear({x.data(), rows, heads, view, out.data(), view.n / heads}, compute_); });
  }

  void attention(const AnyIn& q, const KvMemory& kv, int layer, const Batch& batch, int heads,
                 const AttentionRule& rule, const AnyOut& out) const {
    check_kv(kv, layer, batch, heads);
    require(heads > 0, "attention needs queries");
    const auto rows = static_cast<size_t>(batch.view.tokens * heads);
    require(q.size() == rows * static_cast<size_t>(kv.view.key_dim) && q.itemsize() == size(),
            "q must be compute [T, H, C]");
    check_out(out, rows * static_cast<size_t>(kv.view.value_dim));
    rule.check(heads);
    require(rule.keys.until <= batch.shortest, "every sequence must reach the keys that all its tokens see");
    AttentionCut cut;
    AttentionArgs args;
    cut.cut(kv.view, kv.places.of(batch.view, layer), heads, rule.keys, args);
    args.q = q.data();
    args.layer = kv.places.place(layer);
    args.softmax = rule.softmax;
    args.out = out.data();
    without_gil([&] { family_->attention(args, compute_); });
  }

  // Without a cache; `rule` says all but on which side.
  void attention_once(const In<float, 2>& qkv, const In<int32_t, 1>& starts, const Rope* rope,
                      const std::optional<In<int32_t, 1>>& rows, std::pair<int, int> heads, bool causal,
                      const AttentionRule& rule, const std::optional<In<float, 2>>& bias, const AnyOut& out) {
    const auto [query, kv] = heads;
    require(kv > 0 && query > 0 && query % kv == 0, "query heads must be a multiple of key-value heads");
    const long tokens = dim(qkv, 0), width = dim(qkv, 1), dims = width / (query + 2 * kv);
    require(dims > 0 && width == dims * (query + 2 * kv), "qkv must be [T, (H + 2 G) C]");
    require(dims % 2 == 0 && dims <= kMaxHeadDim, "head size must be even and at most 1024");
    check_starts(starts, tokens);
    if (rope != nullptr) check_rows(*rope, rows, starts, tokens, dims);
    rule.check(query);
    require(!bias || (dim(*bias, 0) == query && dim(*bias, 1) % 2 == 1), "bias must be [H, 2 R + 1]");
    check_out(out, static_cast<size_t>(tokens * query * dims));
    const KeyRule keys{rule.keys.window, rule.keys.chunk, !causal};
    const BiasView added = bias ? BiasView{bias->data(), dim(*bias, 1) / 2} : BiasView{};
    const OnceArgs args{qkv.data(), rope == nullptr ? RopeView{} : rope->view, rows ? rows->data() : nullptr,
                        starts.data(), dim(starts, 0) - 1, query, kv, static_cast<int>(dims), keys, rule.softmax, added,
                        out.data()};
    without_gil([&] { once_.run(*family_, compute_, args); });
  }

 private:
  static void check_starts(const In<int32_t, 1>& starts, long tokens) {
    const long last = dim(starts, 0) - 1;
    require(last >= 0 && starts.data()[0] == 0 && starts.data()[last] == tokens, "starts must span all tokens");
    for (long s = 0; s < last; ++s) require(starts.data()[s] <= starts.data()[s + 1], "starts must ascend");
  }

  static void check_rows(const Rope& rope, const std::optional<In<int32_t, 1>>& rows, const In<int32_t, 1>& starts,
                         long tokens, long dims) {
    require(2 * rope.view.pairs <= dims, "the rope table has more columns than a head");
    if (rows) {
      require(dim(*rows, 0) == tokens, "a row of the rope table for every token");
      require_ids(ids_of(*rows), rope.positions, "row outside the rope table");
      return;
    }
    for (long s = 0; s + 1 < dim(starts, 0); ++s)
      require(starts.data()[s + 1] - starts.data()[s] <= rope.positions, "the rope table must reach the last position");
  }

  size_t size() const { return compute_ == Compute::kBf16 ? 2 : 4; }

  void check_out(const AnyOut& out, size_t count) const {
    require(out.size() == count && out.itemsize() == size(), "out has another shape or type");
  }

  void check_heads(const PackedView& weight, long heads, long n) const {
    require(heads > 0 && weight.n == heads * n, "the weight must be [H N, K]");
    require(weight.per_cell == (compute_ == Compute::kBf16 ? 2 : 1), "the weight was packed for the other compute type");
    require(weight.segments == 1 && weight.direct(), "a product of heads is one segment of whole cells");
  }

  static void check_latent(const KvView& kv, const Rope& rope, const Batch& batch) {
    require(kv.shared && kv.kv_heads == 1, "the KV memory holds no latent vectors");
    require(kv.key_dim - kv.value_dim == 2 * rope.view.pairs, "the columns behind the values are rotated");
    require(rope.positions > batch.last_position, "the rope table must reach the last position");
  }

  void check_kv(const KvMemory& kv, int layer, const Batch& batch, int heads) const {
    require(kv.view.per_cell == (compute_ == Compute::kBf16 ? 2 : 1), "the KV memory holds the other compute type");
    require(kv.places.has(layer), "no such layer");
    require(heads >= 0 && heads % kv.view.kv_heads == 0, "query heads must be a multiple of key-value heads");
    batch.check_pages(kv.view.pages, kv.places.groups());
  }

  const Family* family_;
  Compute compute_;
  AttentionOnce once_;
};

}  // namespace

void bind_attention(nb::module_& m) {
  nb::class_<Rope>(m, "Rope").def(nb::init<In<float, 3>, bool, std::optional<In<uint8_t, 1>>>(), nb::arg(), nb::arg(),
                                  nb::arg().none());
  nb::class_<AttentionRule>(m, "AttentionRule")
      .def(nb::init<float, long, long, float, const std::optional<In<float, 1>>&, long,
                    const std::optional<std::tuple<long, long, long, long>>&>(),
           nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg(), nb::arg().none());
  nb::class_<AttentionKernels>(m, "AttentionKernels")
      .def(nb::init<const std::string&, const std::string&>())
      .def("norm_heads", &AttentionKernels::norm_heads)
      .def("rope_and_write", &AttentionKernels::rope_and_write, nb::arg(), nb::arg().none(), nb::arg().none(), nb::arg(),
           nb::arg(), nb::arg(), nb::arg(), nb::arg())
      .def("latent_write", &AttentionKernels::latent_write)
      .def("latent_query", &AttentionKernels::latent_query)
      .def("heads_linear", &AttentionKernels::heads_linear)
      .def("attention", &AttentionKernels::attention)
      .def("attention_once", &AttentionKernels::attention_once, nb::arg(), nb::arg(), nb::arg().none(), nb::arg().none(),
           nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg());
}

}  // namespace penstock
