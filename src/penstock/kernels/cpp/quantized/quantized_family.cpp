// Quantized weights in one kernel family: compiled once a family, as families/family.cpp is.
#include "quantized/int8_gemm.hpp"
#include "quantized/quantized_gemm.hpp"

#define PS_STRING_OF(x) #x
#define PS_STRING(x) PS_STRING_OF(x)

namespace {

template <class D>
void linear_by_inputs(const QuantLinearArgs& args) {
  args.weight.int8_inputs ? linear_int8<D>(args) : linear_quantized<D>(args);
}

// All weights of a model have the same inputs.
template <class D>
void group_by_inputs(const QuantGroup& group) {
  group.count > 0 && group.calls[0].weight.int8_inputs ? linear_group_int8<D>(group) : linear_group_quantized<D>(group);
}

void linear_by_type(const QuantLinearArgs& args, Compute compute) {
  compute == Compute::kBf16 ? linear_by_inputs<Bf16>(args) : linear_by_inputs<Fp32>(args);
}

void group_by_type(const QuantGroup& group, Compute compute) {
  compute == Compute::kBf16 ? group_by_inputs<Bf16>(group) : group_by_inputs<Fp32>(group);
}

}  // namespace

namespace penstock {

extern const QuantFamily PENSTOCK_QUANTIZED;
const QuantFamily PENSTOCK_QUANTIZED = {PS_STRING(PENSTOCK_FAMILY), linear_by_type, group_by_type,
                                              embed_quantized};

}  // namespace penstock
