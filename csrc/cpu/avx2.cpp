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

constexpr int kSumRegisters = 8;                    // accumulators, of 16 registers
constexpr int kMasksAtOnce = 8;                     // masks in one pass over a row for one token; half as many for two
constexpr std::int64_t kMaxFewTokens = 4;           // with more tokens, many_tokens.h is faster
constexpr bool kReadsBytes = true;                  // weights in 8 bits are decoded in registers (mglu_cpu.cpp)
constexpr int kTileFeatures = 6;                    // of a tile of sums: 12 sums, 2 vectors of x, 1 weight
constexpr int kFloat64Features = 6;                 // features of a tile of float64 sums
constexpr std::int64_t kProductsPerTask = 1 << 17;  // least work of a task: some microseconds, like waking a thread

#include "unrolled.h"
#include "element.h"
#include "vec_avx2.h"
#include "mask_table.h"
#include "mask_table_and_shift.h"

// How masks are applied to sums over a whole row, and to sums of a few products.
template <int Masks>
using RowMasks = MixedMasks<Masks>;
template <int Masks>
using StepMasks = TableMasks<Masks>;

#include "vec_math.h"

#include "mask_weights.h"
#include "work_queue.h"
#include "operands.h"
#include "row_sums.h"
#include "small_values.h"
#include "terms.h"
#include "few_tokens.h"
#include "many_tokens.h"

#include "forward.h"

}  // namespace

Status forward_avx2(const Forward& call, ParallelFor parallel_for) { return forward_any_dtype(call, parallel_for); }

}  // namespace mglu::cpu

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
