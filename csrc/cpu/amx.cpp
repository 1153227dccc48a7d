// The bfloat16 kernels for AMX-BF16 and many tokens: Intel servers from 2023 on (Sapphire Rapids), on Linux
// (features.cpp).
#include "kernels.h"

#if defined(MGLU_BUILDS_BFLOAT16)
#include "avx512_target.h"

MGLU_BEGIN_AVX512("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16,amx-tile,amx-bf16,f16c,fma")

namespace mglu::cpu {
namespace {

constexpr std::int64_t kProductsPerTask = 1 << 20;  // a task of this size takes as long as waking a thread

#include "vec_avx512.h"
#include "mask_words.h"
#include "terms.h"
#include "multiply_amx.h"
#include "many_tokens_bf16.h"

}  // namespace

Status forward_amx(const Forward& call, ParallelFor parallel_for) { return forward_tiles(call, parallel_for); }

}  // namespace mglu::cpu

MGLU_END_AVX512
#endif
