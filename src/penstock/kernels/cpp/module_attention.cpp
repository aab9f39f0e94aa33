// The Python face of the operations around attention.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include "attention_cut.hpp"
#include "binding.hpp"
#include "dispatch.hpp"

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
                        q_scale ? q_scale->data() : nullptr,
                        batch.sequence_of.data(),
                        batch.view,
                        view,
                        layer,
                        heads,
                        q.data()};
    without_gil([&] { family_->rope_and_write(args, compute_); });
  }

  void attention(const AnyIn& q, const KvMemory& kv, int layer, const Batch& batch, int heads,
                 const AttentionRule& rule, const AnyOut& out) const {
    check_kv(kv, layer, batch, heads);
    const auto rows = static_cast<size_t>(batch.view.tokens * heads);
    require(q.size() == rows * static_cast<size_t>(kv.view.key_dim) && q.itemsize() == size(),
            "q must be compute [T, H, C]");
    check_out(out, rows * static_cast<size_t>(kv.view.value_dim));
    rule.check(heads);
    AttentionCut cut;
    AttentionArgs args;
    cut.cut(kv.view, batch.view, heads, rule.keys, args);
    args.q = q.data();
    args.layer = layer;
    args.softmax = rule.softmax;
    args.out = out.data();
    without_gil([&] { family_->attention(args, compute_); });
  }

 private:
  size_t size() const { return compute_ == Compute::kBf16 ? 2 : 4; }

  void check_out(const AnyOut& out, size_t count) const {
    require(out.size() == count && out.itemsize() == size(), "out has another shape or type");
  }

  void check_kv(const KvMemory& kv, int layer, const Batch& batch, int heads) const {
    require(kv.view.per_cell == (compute_ == Compute::kBf16 ? 2 : 1), "the KV memory holds the other compute type");
    require(layer >= 0 && layer < kv.view.layers, "no such layer");
    require(heads > 0 && heads % kv.view.kv_heads == 0, "query heads must be a multiple of key-value heads");
    batch.check_pages(kv.view.pages);
  }

  const Family* family_;
  Compute compute_;
};

}  // namespace

void bind_attention(nb::module_& m) {
  nb::class_<Rope>(m, "Rope").def(nb::init<In<float, 3>, bool>());
  nb::class_<AttentionRule>(m, "AttentionRule")
      .def(nb::init<float, long, long, float, const std::optional<In<float, 1>>&>(), nb::arg(), nb::arg(), nb::arg(),
           nb::arg(), nb::arg().none());
  nb::class_<AttentionKernels>(m, "AttentionKernels")
      .def(nb::init<const std::string&, const std::string&>())
      .def("norm_heads", &AttentionKernels::norm_heads)
      .def("rope_and_write", &AttentionKernels::rope_and_write, nb::arg(), nb::arg().none(), nb::arg().none(), nb::arg(),
           nb::arg(), nb::arg(), nb::arg(), nb::arg())
      .def("attention", &AttentionKernels::attention);
}

}  // namespace penstock
