// AVX512-BF16 and VBMI, for bfloat16: Intel servers from 2021 on, AMD from Zen 4 on.
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
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16,f16c,fma"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16,f16c,fma")
#endif

namespace mglu::cpu {
namespace {

constexpr int kSumRegisters = 20;                   // accumulators, of 32 registers
constexpr int kMasksAtOnce = 8;                     // masks in one pass over a row for one token; half as many for two
constexpr std::int64_t kMaxBlockSteps = 16;         // tiles of a k-block; 8 with only one panel of tokens
constexpr std::int64_t kMinBlockFeatures = 256;     // features x products of a block; with fewer, x comes from L3
constexpr std::int64_t kMaxSums = 192 * 1024;       // floats of a block's sums, 768 KB
constexpr std::int64_t kMaxPanelsInL2 = 8;          // with at most this many panels of x, the smallest block is best
constexpr std::int64_t kMaxFewTokens = 4;           // with more tokens, many_tokens_bf16.h is faster
constexpr bool kReadsBytes = true;                  // weights in 8 bits are decoded in registers (mglu_cpu.cpp)
constexpr std::int64_t kProductsPerTask = 1 << 18;  // least work of a task: some microseconds, like waking a thread

#include "unrolled.h"
#include "element.h"
#include "vec_avx512.h"

#include "mask_words.h"
#include "weight_words.h"

#include "vec_math.h"

#include "mask_weights.h"
#include "row_sums_bf16.h"
#include "small_values.h"
#include "terms.h"
#include "few_tokens.h"

#include "work_queue.h"
#include "tiles.h"
#include "multiply_dot.h"
#include "many_tokens_bf16.h"

}  // namespace

Status forward_avx512_bf16(const Forward& call, ParallelFor parallel_for) {
    const bool is_dense = call.weight_format == WeightFormat::dense;
    if ((call.tokens > kMaxFewTokens || call.partials) && is_dense) return forward_tiles(call, parallel_for);
    const Floats term_weights = load_mask_weights(call);
    return term_weights ? forward_few<BFloat16>(call, parallel_for, term_weights.get()) : Status::out_of_memory;
}

}  // namespace mglu::cpu

#if defined(__clang__) && !defined(MGLU_EMULATE_AVX512)
#pragma clang attribute pop
#endif
#endif
