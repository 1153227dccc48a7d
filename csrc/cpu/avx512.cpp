// AVX-512 F, BW, DQ and VL: Intel servers from 2017 on, AMD from Zen 4 on.
#include "kernels.h"

#if defined(__x86_64__)
#include <type_traits>
#include <utility>

#if defined(MGLU_EMULATE_AVX512)  // the tests' own intrinsics, plain loops, for machines without the real ones
#include MGLU_EMULATE_AVX512
#else
#include <immintrin.h>
#endif

#if defined(MGLU_EMULATE_AVX512)
#elif defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,f16c,fma"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,f16c,fma")
#endif

namespace mglu::cpu {
namespace {

constexpr int kSumRegisters = 20;                  // of 32
constexpr int kMasksAtOnce = 8;                    // of one token; half as many of two
constexpr std::int64_t kFewTokens = 4;             // more are faster in many_tokens.h
constexpr int kFeaturesOfWideTile = 12;            // 24 sums, 2 vectors of x, 1 weight
constexpr int kFeaturesOfWideSums = 12;             // as many registers of float64 sums
constexpr std::int64_t kWorkOfTask = 1 << 17;      // products; some microseconds, as a thread's wake-up

#include "unrolled.h"
#include "element.h"
#include "vec_avx512.h"

#include "vec_math.h"

#include "routes.h"
#include "work_queue.h"
#include "row_sums.h"
#include "few_tokens.h"
#include "many_tokens.h"

#include "forward.h"

}  // namespace

Status forward_avx512(const Forward& call, ParallelFor parallel_for) { return forward_here(call, parallel_for); }

}  // namespace mglu::cpu

#if defined(__clang__) && !defined(MGLU_EMULATE_AVX512)
#pragma clang attribute pop
#endif
#endif
