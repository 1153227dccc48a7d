// Detects instruction sets. `__builtin_cpu_supports` also asks whether the operating system saves the registers.
// Features that older compilers do not know are read by `cpuid`, once, because in a virtual machine the host handles
// each `cpuid`, which takes about 10 us.
#include "kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace mglu::cpu {
namespace {

struct Registers {
    unsigned int a = 0, b = 0, c = 0, d = 0;
};

// All registers are 0 if the CPU has no such leaf.
Registers ask(unsigned int leaf, unsigned int subleaf) {
    Registers r;
    return __get_cpuid_count(leaf, subleaf, &r.a, &r.b, &r.c, &r.d) ? r : Registers{};
}

bool has_bit(unsigned int word, int bit) { return word >> bit & 1; }

}  // namespace

bool has_avx2() {
    static const bool has_f16c = has_bit(ask(1, 0).c, 29);
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c;
}

#if defined(MGLU_EMULATE_AVX512)
bool has_avx512() { return true; }
bool has_avx512_bf16() { return true; }
bool has_amx() { return true; }
#else
bool has_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

#if defined(MGLU_BUILDS_BFLOAT16)
bool has_avx512_bf16() {
    static const bool has = has_avx512() && has_bit(ask(7, 0).c, 1) && has_bit(ask(7, 1).a, 5);  // VBMI; BF16
    return has;
}

// Linux enables AMX tiles (8 KB more state for each thread) for a process that asks, for all its threads.
bool has_amx() {
    static const bool has = [] {
        constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
        const unsigned int features = ask(7, 0).d;
        const bool here = has_avx512_bf16() && has_bit(features, 22) && has_bit(features, 24);  // AMX-BF16; AMX-TILE
        return here && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
    }();
    return has;
}
#else
bool has_avx512_bf16() { return false; }
bool has_amx() { return false; }
#endif
#endif

}  // namespace mglu::cpu
#endif
