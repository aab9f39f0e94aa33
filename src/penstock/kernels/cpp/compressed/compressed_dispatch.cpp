#include <cstring>

#include "amx/amx_family.hpp"

namespace penstock {

extern const CompressedFamily compressed_portable;
#if defined(PENSTOCK_X86)
extern const CompressedFamily compressed_avx2;
extern const CompressedFamily compressed_avx512;
extern const CompressedFamily compressed_avx512_bf16;
extern const CompressedFamily compressed_avx512_bf16_vbmi2;
#endif

const CompressedFamily& compressed_family([[maybe_unused]] const char* name) {
#if defined(PENSTOCK_X86)
  __builtin_cpu_init();
  if (std::strcmp(name, "amx_bf16") == 0 && allow_amx()) return compressed_amx_family();
  if (std::strcmp(name, "avx512_bf16") == 0) {
    const bool expands = __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2");
    return expands ? compressed_avx512_bf16_vbmi2 : compressed_avx512_bf16;
  }
  if (std::strcmp(name, "avx512") == 0) return compressed_avx512;
  if (std::strcmp(name, "avx2") == 0) return compressed_avx2;
#endif
  return compressed_portable;
}

}  // namespace penstock
