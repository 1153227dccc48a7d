// Shared declarations of this folder: a `forward` for each instruction set, and helpers that use no special
// instructions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <type_traits>
#include <utility>

#include "../cuda/packed_masks.cuh"
#include "mglu_cpu.h"

#define MGLU_INLINE inline __attribute__((always_inline))

// Functions between MGLU_BEGIN_TARGET and MGLU_END_TARGET may use instruction sets beyond the compiler's default; with
// GCC, so may all functions up to the end of the file.
#define MGLU_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define MGLU_BEGIN_TARGET(names) MGLU_PRAGMA(clang attribute push(__attribute__((target(names))), apply_to = function))
#define MGLU_END_TARGET MGLU_PRAGMA(clang attribute pop)
#else
#define MGLU_BEGIN_TARGET(names) MGLU_PRAGMA(GCC target(names))
#define MGLU_END_TARGET
#endif

namespace mglu::cpu {

using ForwardFunction = Status (*)(const Forward&, ParallelFor);

constexpr std::int64_t kMaxFewTokens = 4;  // for more tokens, many_tokens.h is faster than few_tokens.h

// True if each row of W has one scale, which can then multiply the row's sums.
constexpr bool has_row_scales(WeightFormat format) {
    return format == WeightFormat::fp8_row || format == WeightFormat::int8_row;
}

// Decodes a weight that is not dense and calls `run`, a function for dense weights. The decoded weight has x's type if
// the format has row scales, else float32. `call` has been checked and is not empty.
Status forward_decoded(const Forward& call, ParallelFor parallel_for, ForwardFunction run);

// One function per instruction set, which this machine must have. `call` has been checked and is not empty. Its weight
// is dense; AVX2, AVX-512 and AVX512-BF16 also take int8_row and fp8_row for few tokens. AVX512-BF16 and AMX take only
// bfloat16.
Status forward_portable(const Forward& call, ParallelFor parallel_for);
#if defined(__x86_64__)
Status forward_avx2(const Forward& call, ParallelFor parallel_for);
Status forward_avx512(const Forward& call, ParallelFor parallel_for);
Status forward_avx512_bf16(const Forward& call, ParallelFor parallel_for);
Status forward_amx(const Forward& call, ParallelFor parallel_for);

bool has_avx2();
bool has_avx512();
bool has_avx512_bf16();
bool has_amx();
#endif

// The files for bfloat16 need a compiler that knows the instructions AVX512-BF16 and AMX, and Linux, since features.cpp
// requests AMX tiles by a system call of Linux.
#if defined(__x86_64__) && \
    (defined(MGLU_EMULATE_AVX512) || (defined(__linux__) && (__GNUC__ >= 11 || __clang_major__ >= 12)))
#define MGLU_BUILDS_BFLOAT16
#endif

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
constexpr std::int64_t smaller(std::int64_t a, std::int64_t b) { return a < b ? a : b; }

// Calls `body(begin, end)` on ranges that cover [0, count), each of at least `grain` indices.
template <class Ranges>
Status over_ranges(ParallelFor parallel_for, std::int64_t count, std::int64_t grain, Ranges body) {
    const auto run = [](std::int64_t begin, std::int64_t end, void* context) {
        (*static_cast<Ranges*>(context))(begin, end);
    };
    return parallel_for(0, count, grain, run, &body) ? Status::parallel_for_failed : Status::ok;
}

// Uninitialised floats at the start of a cache line, or null if the allocation fails.
struct Free {
    void operator()(float* pointer) const { std::free(pointer); }
};
using Floats = std::unique_ptr<float[], Free>;

inline Floats allocate_floats(std::int64_t count) {
    const std::size_t bytes = static_cast<std::size_t>(count / 16 + 1) * 64;  // not 0: aligned_alloc(0) may be null
    return Floats(static_cast<float*>(std::aligned_alloc(64, bytes)));
}

}  // namespace mglu::cpu

// Exports a function of this folder as mglu_cpu_<name>, for ctypes. These names are stable.
#define MGLU_EXPORT extern "C" __attribute__((visibility("default")))
#define MGLU_EXPORT_CALL(name, Call)                                                                             \
    MGLU_EXPORT std::int32_t mglu_cpu_##name(const mglu::cpu::Call* call, mglu::cpu::ParallelFor parallel_for) { \
        return static_cast<std::int32_t>(mglu::cpu::name(*call, parallel_for));                                  \
    }
