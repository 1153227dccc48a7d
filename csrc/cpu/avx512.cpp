// AVX-512 F, BW, DQ and VL: Intel servers from 2017 on, AMD from Zen 4 on.
#include "kernels.h"

#if defined(__x86_64__)
#include <type_traits>
#include <utility>

#if defined(MGLU_EMULATE_AVX512)  // the tests' intrinsics, plain loops for machines without AVX-512
#include MGLU_EMULATE_AVX512
#else
#include <immintrin.h>
#endif

#if defined(MGLU_EMULATE_AVX512)
#elif defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,f16c,fma"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,f16c,fma")
#endif

namespace mglu::cpu {
namespace {

constexpr int kSumRegisters = 20;                   // accumulators, of 32 registers
constexpr int kMasksAtOnce = 8;                     // masks in one pass over a row for one token; half as many for two
constexpr std::int64_t kMaxFewTokens = 4;           // with more tokens, many_tokens.h is faster
constexpr bool kReadsBytes = true;                  // weights in 8 bits are decoded in registers (mglu_cpu.cpp)
constexpr int kTileFeatures = 12;                   // of a tile of sums: 24 sums, 2 vectors of x, 1 weight
constexpr int kFloat64Features = 12;                // features of a tile of float64 sums
constexpr std::int64_t kProductsPerTask = 1 << 17;  // least work of a task: some microseconds, like waking a thread

#include "unrolled.h"
#include "element.h"
#include "vec_avx512.h"

#include "vec_math.h"

#include "mask_weights.h"
#include "work_queue.h"
#include "operands.h"
#include "row_sums_avx512.h"
#include "small_values.h"
#include "terms.h"
#include "few_tokens.h"
#include "many_tokens.h"

#include "forward.h"

}  // namespace

Status forward_avx512(const Forward& call, ParallelFor parallel_for) { return forward_any_dtype(call, parallel_for); }

}  // namespace mglu::cpu

#if defined(__clang__) && !defined(MGLU_EMULATE_AVX512)
#pragma clang attribute pop
#endif
#endif
