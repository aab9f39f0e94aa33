// The family amx_bf16: avx512_bf16 with bf16 matrix products on the tiles of Intel AMX (amx/amx_gemm.hpp).
//
// It was tested in emulation only, never on a processor that has the tiles; so it is there for who names it, and never
// the first of a list.
#pragma once

#include "compressed/compressed.hpp"

namespace penstock {

#if defined(PENSTOCK_EMULATE_AMX)
constexpr bool kEmulatesAmx = true;
#else
constexpr bool kEmulatesAmx = false;
#endif

// Null where the processor, the system or this build has no tiles.
const Family* amx_family();

// Lets this process, its threads and its later children use the tiles; false when the system refuses.  Nothing of the
// family may run before.
bool allow_amx();

const CompressedFamily& compressed_amx_family();

// amx/amx_kernels.cpp.  All take and give bf16; fp32 is that of avx512_bf16.
void linear_amx(const LinearArgs& args);
void linear_compressed_amx(const CompressedLinearArgs& args);
double multiply_amx(long repeats);

}  // namespace penstock
