// Quantized weights in one kernel family: compiled once a family, as families/family.cpp is.
#include "quantized/quantized_gemm.hpp"

#define PS_STRING_OF(x) #x
#define PS_STRING(x) PS_STRING_OF(x)

namespace {

void linear_by_type(const QuantLinearArgs& args, Compute compute) {
  compute == Compute::kBf16 ? linear_quantized<Bf16>(args) : linear_quantized<Fp32>(args);
}

void group_by_type(const QuantGroup& group, Compute compute) {
  compute == Compute::kBf16 ? linear_group_quantized<Bf16>(group) : linear_group_quantized<Fp32>(group);
}

}  // namespace

namespace penstock {

extern const QuantFamily PENSTOCK_QUANTIZED;
const QuantFamily PENSTOCK_QUANTIZED = {PS_STRING(PENSTOCK_FAMILY), linear_by_type, group_by_type,
                                              embed_quantized};

}  // namespace penstock
