#include <cstring>

#include "quantized/quantized.hpp"

namespace penstock {

extern const QuantFamily quantized_portable;
#if defined(PENSTOCK_X86)
extern const QuantFamily quantized_avx2;
extern const QuantFamily quantized_avx512;
extern const QuantFamily quantized_avx512_vbmi;
extern const QuantFamily quantized_avx512_bf16;
extern const QuantFamily quantized_avx512_bf16_vbmi;
#endif

const QuantFamily& quantized_family([[maybe_unused]] const char* name) {
#if defined(PENSTOCK_X86)
  __builtin_cpu_init();
  const bool bytes = __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni");
  if (std::strcmp(name, "avx512_bf16") == 0 || std::strcmp(name, "amx_bf16") == 0)
    return bytes ? quantized_avx512_bf16_vbmi : quantized_avx512_bf16;
  if (std::strcmp(name, "avx512") == 0) return bytes ? quantized_avx512_vbmi : quantized_avx512;
  if (std::strcmp(name, "avx2") == 0) return quantized_avx2;
#endif
  return quantized_portable;
}

}  // namespace penstock
