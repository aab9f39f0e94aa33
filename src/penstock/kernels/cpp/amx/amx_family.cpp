// Compiled for any x86-64 processor: it is this code that finds out whether the tiles are there.
#include "amx/amx_family.hpp"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace penstock {

extern const Family family_avx512_bf16;
extern const CompressedFamily compressed_avx512_bf16_vbmi2;

namespace {

constexpr const char* kName = "amx_bf16";

void linear(const LinearArgs& args, Compute compute) {
  compute == Compute::kBf16 ? linear_amx(args) : family_avx512_bf16.linear(args, compute);
}

void linear_group(const LinearGroup& group, Compute compute) {
  for (long i = 0; i < group.count; ++i) linear(group.calls[i], compute);
}

void linear_group_compressed(const CompressedGroup& group) {
  for (long i = 0; i < group.count; ++i) linear_compressed_amx(group.calls[i]);
}

double multiply(long repeats, Compute compute) {
  return compute == Compute::kBf16 ? multiply_amx(repeats) : family_avx512_bf16.multiply(repeats, compute);
}

bool runs_the_rest() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bf16") &&
         __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2");
}

#if defined(PENSTOCK_EMULATE_AMX)
bool has_tiles() { return true; }
bool ask_for_tiles() { return true; }
#else
constexpr unsigned kSavesState = 1u << 27;                    // CPUID 1, ECX: XGETBV is there
constexpr unsigned kTileFeatures = 1u << 22 | 1u << 24;       // CPUID 7, EDX: AMX-BF16, AMX-TILE
constexpr int kTileDataState = 18;                            // of XCR0; 17 is the configuration
constexpr unsigned kTileStates = 3u << (kTileDataState - 1);
constexpr long kSupportedStates = 0x1021, kRequestState = 0x1023;  // arch_prctl: ARCH_GET_XCOMP_SUPP, ARCH_REQ_XCOMP_PERM

bool has_tiles() {
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || (c & kSavesState) == 0) return false;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kTileFeatures) != kTileFeatures) return false;
  unsigned enabled, upper;
  asm volatile("xgetbv" : "=a"(enabled), "=d"(upper) : "c"(0));
  if ((enabled & kTileStates) != kTileStates) return false;
  uint64_t supported = 0;
  return syscall(SYS_arch_prctl, kSupportedStates, &supported) == 0 && (supported >> kTileDataState & 1) != 0;
}

// Asking again is harmless.  Children inherit the answer; a program that is executed does not, and asks for itself.
bool ask_for_tiles() { return syscall(SYS_arch_prctl, kRequestState, kTileDataState) == 0; }
#endif

}  // namespace

const Family* amx_family() {
  static const bool usable = runs_the_rest() && has_tiles();
  static const Family family = [] {
    Family made = family_avx512_bf16;
    made.name = kName;
    made.linear = linear;
    made.linear_group = linear_group;
    made.multiply = multiply;
    return made;
  }();
  return usable ? &family : nullptr;
}

bool allow_amx() {
  static const bool allowed = amx_family() != nullptr && ask_for_tiles();
  return allowed;
}

const CompressedFamily& compressed_amx_family() {
  static const CompressedFamily family = [] {
    CompressedFamily made = compressed_avx512_bf16_vbmi2;
    made.name = kName;
    made.linear = linear_compressed_amx;
    made.linear_group = linear_group_compressed;
    return made;
  }();
  return family;
}

}  // namespace penstock
