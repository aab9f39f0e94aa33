// Which families this build has and this processor can run.
#include <cstring>

#include "amx/amx_family.hpp"
#include "families/dispatch.hpp"

namespace penstock {

extern const Family family_portable;
#if defined(PENSTOCK_X86)
extern const Family family_avx2;
extern const Family family_avx512;
extern const Family family_avx512_bf16;
#endif

namespace {

#if defined(PENSTOCK_X86)
bool is_allowed(const Family* family) { return family != amx_family() || allow_amx(); }
#else
bool is_allowed(const Family*) { return true; }
#endif

}  // namespace

const std::vector<const Family*>& usable_families() {
  static const std::vector<const Family*> usable = [] {
    std::vector<const Family*> found;
#if defined(PENSTOCK_X86)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (avx512 && __builtin_cpu_supports("avx512bf16")) found.push_back(&family_avx512_bf16);
    if (const Family* amx = amx_family(); amx != nullptr) found.push_back(amx);  // never the first
    if (avx512) found.push_back(&family_avx512);
    if (avx2) found.push_back(&family_avx2);
#endif
    found.push_back(&family_portable);
    return found;
  }();
  return usable;
}

const Family* find_family(const char* name) {
  for (const Family* family : usable_families())
    if (std::strcmp(family->name, name) == 0) return is_allowed(family) ? family : nullptr;
  return nullptr;
}

}  // namespace penstock
