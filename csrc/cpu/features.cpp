// Asks `cpuid` for instruction sets, and `xgetbv` for the registers that the operating system saves. The compiler's
// `__builtin_cpu_supports` is not used: in older compilers it knows fewer features, and in `zig c++` it is always
// false. Results are cached, because in a virtual machine the host handles each `cpuid`, which takes about 10 us.
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

// Returns the registers that `cpuid` sets for a leaf, or zeros if the CPU lacks the leaf.
Registers ask(unsigned int leaf, unsigned int subleaf) {
    Registers r;
    return __get_cpuid_count(leaf, subleaf, &r.a, &r.b, &r.c, &r.d) ? r : Registers{};
}

bool has_bit(unsigned int word, int bit) { return word >> bit & 1; }

// True if the operating system saves all register sets in `registers`, a bit mask in the layout of XCR0.
bool saves(unsigned int registers) {
    if (!has_bit(ask(1, 0).c, 27)) return false;  // without OSXSAVE, there is no xgetbv
    unsigned int low = 0, high = 0;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low & registers) == registers;
}

}  // namespace

bool has_avx2() {
    static const bool has = [] {
        constexpr unsigned int kVectors256 = 0x06;
        const unsigned int features = ask(1, 0).c;
        return saves(kVectors256) && has_bit(features, 12) && has_bit(features, 29) &&  // FMA; F16C
               has_bit(ask(7, 0).b, 5);                                                 // AVX2
    }();
    return has;
}

#if defined(MGLU_EMULATE_AVX512)
bool has_avx512() { return true; }
bool has_avx512_bf16() { return true; }
bool has_amx() { return true; }
#else
bool has_avx512() {
    static const bool has = [] {
        constexpr unsigned int kVectors512 = 0xe6;
        const unsigned int features = ask(7, 0).b;
        return saves(kVectors512) && has_bit(features, 16) && has_bit(features, 17) &&  // AVX512F; AVX512DQ
               has_bit(features, 30) && has_bit(features, 31);                          // AVX512BW; AVX512VL
    }();
    return has;
}

#if defined(MGLU_BUILDS_BFLOAT16)
bool has_avx512_bf16() {
    static const bool has = has_avx512() && has_bit(ask(7, 0).c, 1) && has_bit(ask(7, 1).a, 5);  // VBMI; BF16
    return has;
}

// Linux enables AMX tiles only for processes that ask for them, because tiles add 8 KB to the state of each thread.
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
