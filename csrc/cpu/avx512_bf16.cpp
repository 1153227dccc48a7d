// The bfloat16 kernels for AVX512-BF16 and VBMI: Intel servers from 2021 on, AMD from Zen 4 on.
#include "kernels.h"

#if defined(MGLU_BUILDS_BFLOAT16)
#include "avx512_target.h"

MGLU_BEGIN_AVX512("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16,f16c,fma")

namespace mglu::cpu {
namespace {

constexpr int kSumRegisters = 20;                   // of 32 vector registers, those that hold sums
constexpr int kMasksAtOnce = 8;                     // a pass over a row takes at most 8 masks with 1 token, 4 with 2
constexpr bool kReadsBytes = true;                  // 8-bit weights are decoded in registers (mglu_cpu.cpp)
constexpr std::int64_t kProductsPerTask = 1 << 18;  // a task of this size takes as long as waking a thread

#include "vec_avx512.h"
#include "mask_words.h"
#include "terms.h"
#include "row_sums_bf16.h"
#include "few_tokens.h"
#include "linear.h"
#include "multiply_dot.h"
#include "many_tokens_bf16.h"

}  // namespace

Status forward_avx512_bf16(const Forward& call, ParallelFor parallel_for) {
    if (call.n_masks == 0) return linear<BFloat16>(call, parallel_for);
    const bool is_dense = call.weight_format == WeightFormat::dense;
    if ((call.tokens > kMaxFewTokens || call.partials) && is_dense) return forward_tiles(call, parallel_for);
    const Floats term_weights = load_mask_weights(call);
    return term_weights ? forward_few<BFloat16>(call, parallel_for, term_weights.get()) : Status::out_of_memory;
}

}  // namespace mglu::cpu

MGLU_END_AVX512
#endif
