// The entry points: what is checked, and which instruction set runs.
#include "mglu_cpu.h"

#include "kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace mglu::cpu {
namespace {

using ForwardOfIsa = Status (*)(const Forward&, ParallelFor);

#if defined(__x86_64__)
// Which older compilers' __builtin_cpu_supports do not know. Asked once: a virtual machine leaves to its host at each
// cpuid, for ten microseconds.
bool has_f16c() {
    static const bool has = [] {
        unsigned int a = 0, b = 0, c = 0, d = 0;
        return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
    }();
    return has;
}
#endif

// Of a build and a machine that have it, else null. `__builtin_cpu_supports` asks the system too: AVX registers are of
// no use where it does not save them.
ForwardOfIsa forward_of(Isa isa) {
    switch (isa) {
        case Isa::best: return forward_of(best_isa());
        case Isa::portable: return forward_portable;
#if defined(__x86_64__)
        case Isa::avx2: {
            const bool here = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
            return here && has_f16c() ? forward_avx2 : nullptr;
        }
#if defined(MGLU_EMULATE_AVX512)
        case Isa::avx512: return forward_avx512;
#else
        case Isa::avx512: {
            const bool here = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw");
            const bool parts = __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
            return here && parts ? forward_avx512 : nullptr;
        }
#endif
#endif
        default: return nullptr;
    }
}

template <class Enum>
bool is_one_of_first(Enum value, std::int64_t count) {
    const auto number = static_cast<std::int64_t>(value);
    return number >= 0 && number < count;
}

bool is_valid(const Forward& call) {
    const bool sizes = call.tokens >= 0 && call.out_features >= 0 && call.in_features >= 0;
    const bool masks = call.n_masks >= 1 && call.n_masks <= kMaxMasks;
    const bool route = !call.route_weights || is_one_of_first(call.route_dtype, 3);
    return sizes && masks && route && is_one_of_first(call.dtype, 3) && is_one_of_first(call.activation, 7) &&
           is_one_of_first(call.isa, 5);
}

}  // namespace

Status forward(const Forward& call, ParallelFor parallel_for) {
    if (!is_valid(call) || !parallel_for) return Status::invalid_argument;
    const ForwardOfIsa run = forward_of(call.isa);
    if (!run) return Status::unsupported_isa;
    if (call.tokens == 0 || call.out_features == 0) return Status::ok;
    return run(call, parallel_for);
}

bool supports(Isa isa) { return forward_of(isa) != nullptr; }

Isa best_isa() {
    static const Isa best = [] {
        Isa isa = Isa::amx;
        while (!supports(isa)) isa = static_cast<Isa>(static_cast<std::int64_t>(isa) - 1);
        return isa;
    }();
    return best;
}

const char* isa_name(Isa isa) {
    switch (isa) {
        case Isa::best: return "best";
        case Isa::portable: return "portable";
        case Isa::avx2: return "avx2";
        case Isa::avx512: return "avx512";
        case Isa::amx: return "amx";
    }
    return "unknown";
}

const char* status_message(Status status) {
    switch (status) {
        case Status::ok: return "ok";
        case Status::invalid_argument: return "a size, n_masks, dtype, activation or ISA is out of range";
        case Status::out_of_memory: return "no memory for scratch space";
        case Status::parallel_for_failed: return "the thread pool refused the work";
        case Status::unsupported_isa: return "this build or this machine lacks the instruction set";
    }
    return "unknown";
}

std::int32_t serial(std::int64_t begin, std::int64_t end, std::int64_t, Body body, void* context) {
    if (begin < end) body(begin, end, context);
    return 0;
}

}  // namespace mglu::cpu

// For callers without C++: the names stay, whatever the compiler.
#define MGLU_EXPORT extern "C" __attribute__((visibility("default")))

MGLU_EXPORT std::int32_t mglu_cpu_forward(const mglu::cpu::Forward* call, mglu::cpu::ParallelFor parallel_for) {
    return static_cast<std::int32_t>(mglu::cpu::forward(*call, parallel_for));
}

MGLU_EXPORT std::int32_t mglu_cpu_pack_masks(const mglu::cpu::Pack* call, mglu::cpu::ParallelFor parallel_for) {
    return static_cast<std::int32_t>(mglu::cpu::pack_masks(*call, parallel_for));
}

MGLU_EXPORT const char* mglu_cpu_isa() { return mglu::cpu::isa_name(mglu::cpu::best_isa()); }

MGLU_EXPORT std::int32_t mglu_cpu_supports(std::int64_t isa) {
    return isa >= 0 && isa < 5 && mglu::cpu::supports(static_cast<mglu::cpu::Isa>(isa));
}

MGLU_EXPORT const char* mglu_cpu_status_message(std::int32_t status) {
    return mglu::cpu::status_message(static_cast<mglu::cpu::Status>(status));
}
