// AVX2, FMA and F16C: x86 CPUs from 2013 on.
#include "kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <type_traits>
#include <utility>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif

namespace mglu::cpu {
namespace {

constexpr int kSumRegisters = 8;                   // of 16; the others hold products, masks and constants
constexpr int kMasksAtOnce = 8;                    // of one token; half as many of two
constexpr std::int64_t kFewTokens = 4;             // more are faster in many_tokens.h
constexpr int kFeaturesOfWideTile = 6;             // 12 sums, 2 vectors of x, 1 weight
constexpr int kFeaturesOfWideSums = 6;             // as many registers of float64 sums
constexpr std::int64_t kWorkOfTask = 1 << 17;      // products; some microseconds, as a thread's wake-up

#include "unrolled.h"
#include "element.h"
#include "vec_avx2.h"

#include "mask_factors.h"

#include "mask_table.h"

#include "mask_shifts.h"

// For parts that are added up over a whole row, and for those of a few products.
template <int Masks>
using LongMasks = MixedMasks<Masks>;
template <int Masks>
using ShortMasks = TableMasks<Masks>;

#include "vec_math.h"

#include "routes.h"
#include "work_queue.h"
#include "row_sums.h"
#include "few_tokens.h"
#include "many_tokens.h"

#include "forward.h"

}  // namespace

Status forward_avx2(const Forward& call, ParallelFor parallel_for) { return forward_here(call, parallel_for); }

}  // namespace mglu::cpu

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
