// The kernels for AVX2, FMA and F16C: x86 CPUs from 2013 on.
#include "kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>

MGLU_BEGIN_TARGET("avx2,fma,f16c")

namespace mglu::cpu {
namespace {

constexpr int kSumRegisters = 8;                    // of 16 vector registers, those that hold sums
constexpr int kMasksAtOnce = 8;                     // a pass over a row takes at most 8 masks with 1 token, 4 with 2
constexpr bool kReadsBytes = true;                  // 8-bit weights are decoded in registers (mglu_cpu.cpp)
constexpr int kTileFeatures = 6;                    // features of a register tile: 12 sums, 2 vectors of x, 1 weight
constexpr int kFloat64Features = 6;                 // features of a register tile with float64 sums
constexpr std::int64_t kProductsPerTask = 1 << 17;  // a task of this size takes as long as waking a thread

#include "vec_avx2.h"
#include "mask_table.h"
#include "mask_table_and_shift.h"

// The mask classes that row_sums.h uses: RowMasks for sums over a whole row, StepMasks for sums over one step.
template <int Masks>
using RowMasks = MixedMasks<Masks>;
template <int Masks>
using StepMasks = TableMasks<Masks>;

#include "row_sums.h"
#include "forward.h"

}  // namespace

Status forward_avx2(const Forward& call, ParallelFor parallel_for) { return forward_any_dtype(call, parallel_for); }

}  // namespace mglu::cpu

MGLU_END_TARGET
#endif
