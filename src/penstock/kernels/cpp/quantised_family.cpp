// Quantised weights in one kernel family: compiled once a family, as family.cpp is.
#include "quantised_gemm.hpp"

#define PS_STRING_OF(x) #x
#define PS_STRING(x) PS_STRING_OF(x)

namespace {

void linear_by_type(const QuantLinearArgs& args, Compute compute) {
  compute == Compute::kBf16 ? linear_quantised<Bf16>(args) : linear_quantised<Fp32>(args);
}

void group_by_type(const QuantGroup& group, Compute compute) {
  compute == Compute::kBf16 ? linear_group_quantised<Bf16>(group) : linear_group_quantised<Fp32>(group);
}

}  // namespace

namespace penstock {

extern const QuantFamily PENSTOCK_QUANTISED;
const QuantFamily PENSTOCK_QUANTISED = {PS_STRING(PENSTOCK_FAMILY), linear_by_type, group_by_type,
                                              embed_quantised};

}  // namespace penstock
