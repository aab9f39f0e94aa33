// The kernels that set the family amx_bf16 apart; compiled once, under the flags of avx512_bf16 with VBMI2.
//
// As in families/family.cpp, no function of the standard library is instantiated here.
#include "amx/amx_family.hpp"
#include "amx/amx_gemm.hpp"

namespace penstock {

void linear_amx(const LinearArgs& args) {
  linear_tiles<PlainPanels>(args, [&](long panel, int panels, uint32_t* room) {
    return PlainPanels{args.weight, panel, panels, room};
  });
}

void linear_compressed_amx(const CompressedLinearArgs& args) {
  linear_tiles<CompressedPanels>(as_plain(args), [&](long panel, int panels, uint32_t* room) {
    return CompressedPanels(args.weight, panel, panels, room);
  });
}

double multiply_amx(long repeats) { return multiply_tiles(repeats); }

}  // namespace penstock
