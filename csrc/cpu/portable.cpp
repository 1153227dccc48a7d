// The kernels for any CPU, written with the vector extensions of GCC and Clang.
#include "kernels.h"

namespace mglu::cpu {
namespace {

constexpr int kSumRegisters = 8;     // vectors of sums that are held in registers; a Vec takes two registers
constexpr int kMasksAtOnce = 4;      // a pass over a row takes at most 4 masks with 1 token, 2 with 2
constexpr bool kReadsBytes = false;  // decoding 8-bit weights in memory is faster here
constexpr int kTileFeatures = 3;     // features of a register tile: 6 sums take 12 of 16 registers
constexpr int kFloat64Features = 2;  // features of a register tile with float64 sums
constexpr std::int64_t kProductsPerTask = 1 << 16;  // a task of this size takes as long as waking a thread

#include "vec_portable.h"
#include "mask_table.h"

// The mask classes that row_sums.h uses: RowMasks for sums over a whole row, StepMasks for sums over one step.
template <int Masks>
using RowMasks = TableMasks<Masks>;
template <int Masks>
using StepMasks = TableMasks<Masks>;

#include "row_sums.h"
#include "forward.h"

}  // namespace

Status forward_portable(const Forward& call, ParallelFor parallel_for) { return forward_any_dtype(call, parallel_for); }

}  // namespace mglu::cpu
