// One kernel family: compiled once a family, with PENSTOCK_FAMILY naming it and flags choosing the registers.
//
// No function of the standard library is instantiated here: a template compiled for AVX-512 and merged by the linker
// with its twin would crash processors without it.
#include "attention/attention.hpp"
#include "attention/mla.hpp"
#include "attention/rope.hpp"
#include "families/roofline.hpp"
#include "moe/experts.hpp"
#include "rows/rows.hpp"
#include "sampling/sampling.hpp"
#include "states/gated_delta_net.hpp"

#define PS_STRING_OF(x) #x
#define PS_STRING(x) PS_STRING_OF(x)
#define PS_JOIN_OF(a, b) a##b
#define PS_JOIN(a, b) PS_JOIN_OF(a, b)

namespace {

template <class Args, void (*kBf16)(const Args&), void (*kFp32)(const Args&)>
void by_type(const Args& args, Compute compute) {
  compute == Compute::kBf16 ? kBf16(args) : kFp32(args);
}

void convert(const float* from, long count, void* to, Compute compute) {
  compute == Compute::kBf16 ? to_compute_typed<Bf16>(from, count, static_cast<uint16_t*>(to))
                            : to_compute_typed<Fp32>(from, count, static_cast<float*>(to));
}

double multiply_typed(long repeats, Compute compute) {
  return compute == Compute::kBf16 ? multiply<Bf16>(repeats) : multiply<Fp32>(repeats);
}

}  // namespace

namespace penstock {

extern const Family PS_JOIN(family_, PENSTOCK_FAMILY);
const Family PS_JOIN(family_, PENSTOCK_FAMILY) = {
    PS_STRING(PENSTOCK_FAMILY),
    by_type<LinearArgs, linear_typed<Bf16>, linear_typed<Fp32>>,
    by_type<LinearGroup, linear_group_typed<Bf16>, linear_group_typed<Fp32>>,
    by_type<EmbedArgs, embed_typed<Bf16>, embed_typed<Fp32>>,
    by_type<NormArgs, rms_norm_typed<Bf16>, rms_norm_typed<Fp32>>,
    by_type<GatedArgs, gated_typed<Bf16>, gated_typed<Fp32>>,
    by_type<ActivateArgs, activate_typed<Bf16>, activate_typed<Fp32>>,
    by_type<LayerNormArgs, layer_norm_typed<Bf16>, layer_norm_typed<Fp32>>,
    norm_add_rows,
    add_bias_rows,
    add_rows,
    form_rows,
    add_part_rows,
    route_rows,
    by_type<GatherArgs, gather_typed<Bf16>, gather_typed<Fp32>>,
    combine_rows,
    norm_heads_all,
    by_type<RopeArgs, rope_and_write_typed<Bf16>, rope_and_write_typed<Fp32>>,
    by_type<AttentionArgs, attention_typed<Bf16>, attention_typed<Fp32>>,
    by_type<LatentWriteArgs, latent_write_typed<Bf16>, latent_write_typed<Fp32>>,
    by_type<LatentSplitArgs, latent_split_typed<Bf16>, latent_split_typed<Fp32>>,
    by_type<HeadsArgs, heads_linear_typed<Bf16>, heads_linear_typed<Fp32>>,
    causal_conv_all,
    delta_rule_all,
    by_type<GatedNormArgs, gated_norm_typed<Bf16>, gated_norm_typed<Fp32>>,
    by_type<SigmoidGatedArgs, sigmoid_gated_typed<Bf16>, sigmoid_gated_typed<Fp32>>,
    gated_add_rows,
    convert,
    argmax,
    sum_exp,
    exp_minus,
    divide,
    collect,
    gumbel,
    gumbel_argmax,
    log_of,
    read_cells,
    multiply_typed,
};

}  // namespace penstock
