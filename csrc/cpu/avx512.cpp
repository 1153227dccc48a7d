// The kernels for AVX-512 F, BW, DQ and VL: Intel servers from 2017 on, AMD from Zen 4 on.
#include "kernels.h"

#if defined(__x86_64__)
#include "avx512_target.h"

MGLU_BEGIN_AVX512("avx512f,avx512bw,avx512dq,avx512vl,f16c,fma")

namespace mglu::cpu {
namespace {

constexpr int kSumRegisters = 20;                   // of 32 vector registers, those that hold sums
constexpr int kMasksAtOnce = 8;                     // a pass over a row takes at most 8 masks with 1 token, 4 with 2
constexpr bool kReadsBytes = true;                  // 8-bit weights are decoded in registers (mglu_cpu.cpp)
constexpr int kTileFeatures = 12;                   // features of a register tile: 24 sums, 2 vectors of x, 1 weight
constexpr int kFloat64Features = 12;                // features of a register tile with float64 sums
constexpr std::int64_t kProductsPerTask = 1 << 17;  // a task of this size takes as long as waking a thread

#include "vec_avx512.h"
#include "row_sums_avx512.h"
#include "forward.h"

}  // namespace

Status forward_avx512(const Forward& call, ParallelFor parallel_for) { return forward_any_dtype(call, parallel_for); }

}  // namespace mglu::cpu

MGLU_END_AVX512
#endif
