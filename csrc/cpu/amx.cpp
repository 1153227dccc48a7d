// AMX-BF16, for bfloat16 and many tokens: Intel servers from 2023 on (Sapphire Rapids), on Linux (features.cpp).
#include "kernels.h"

#if defined(MGLU_BUILDS_BFLOAT16)
#include <type_traits>
#include <utility>

#if defined(MGLU_EMULATE_AVX512)  // as in avx512.cpp
#include MGLU_EMULATE_AVX512
#else
#include <immintrin.h>
#endif

#if defined(MGLU_EMULATE_AVX512)
#elif defined(__clang__)
#pragma clang attribute push(                                                                                       \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16,amx-tile,amx-bf16,f16c,fma"))), \
    apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16,amx-tile,amx-bf16,f16c,fma")
#endif

namespace mglu::cpu {
namespace {

constexpr std::int64_t kMaxBlockSteps = 16;         // tiles of a k-block; 8 with only one panel of tokens
constexpr std::int64_t kMinBlockFeatures = 256;     // features x products of a block; with fewer, x comes from L3
constexpr std::int64_t kMaxSums = 192 * 1024;       // floats of a block's sums, 768 KB
constexpr std::int64_t kMaxPanelsInL2 = 8;          // with at most this many panels of x, the smallest block is best
constexpr std::int64_t kProductsPerTask = 1 << 20;  // least work of a task: some microseconds, like waking a thread

#include "unrolled.h"
#include "element.h"
#include "vec_avx512.h"

#include "mask_words.h"

#include "vec_math.h"

#include "mask_weights.h"
#include "work_queue.h"
#include "small_values.h"
#include "terms.h"
#include "tiles.h"
#include "multiply_amx.h"
#include "many_tokens_bf16.h"

}  // namespace

Status forward_amx(const Forward& call, ParallelFor parallel_for) { return forward_tiles(call, parallel_for); }

}  // namespace mglu::cpu

#if defined(__clang__) && !defined(MGLU_EMULATE_AVX512)
#pragma clang attribute pop
#endif
#endif
