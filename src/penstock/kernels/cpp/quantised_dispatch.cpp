#include <cstring>

#include "quantised.hpp"

namespace penstock {

extern const QuantFamily quantised_portable;
#if defined(PENSTOCK_X86)
extern const QuantFamily quantised_avx2;
extern const QuantFamily quantised_avx512;
extern const QuantFamily quantised_avx512_vbmi;
extern const QuantFamily quantised_avx512_bf16;
extern const QuantFamily quantised_avx512_bf16_vbmi;
#endif

const QuantFamily& quantised_family([[maybe_unused]] const char* name) {
#if defined(PENSTOCK_X86)
  __builtin_cpu_init();
  const bool bytes = __builtin_cpu_supports("avx512vbmi");
  if (std::strcmp(name, "avx512_bf16") == 0 || std::strcmp(name, "amx_bf16") == 0)
    return bytes ? quantised_avx512_bf16_vbmi : quantised_avx512_bf16;
  if (std::strcmp(name, "avx512") == 0) return bytes ? quantised_avx512_vbmi : quantised_avx512;
  if (std::strcmp(name, "avx2") == 0) return quantised_avx2;
#endif
  return quantised_portable;
}

}  // namespace penstock
