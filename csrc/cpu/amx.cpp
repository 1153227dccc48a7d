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

constexpr std::int64_t kProductsPerTask = 1 << 20;  // least work of a task: some microseconds, like waking a thread

#include "unrolled.h"
#include "element.h"
#include "vec_avx512.h"

#include "mask_words.h"

#include "vec_math.h"

#include "route_weights.h"
#include "work_queue.h"
#include "small_values.h"
#include "many_tokens_amx.h"

}  // namespace

Status forward_amx(const Forward& call, ParallelFor parallel_for) { return forward_tiles(call, parallel_for); }

}  // namespace mglu::cpu

#if defined(__clang__) && !defined(MGLU_EMULATE_AVX512)
#pragma clang attribute pop
#endif
#endif
