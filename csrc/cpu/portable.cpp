// Any CPU, by the vector extensions of GCC and Clang.
#include "kernels.h"

namespace mglu::cpu {
namespace {

constexpr int kSumRegisters = 8;                    // accumulators; a Vec takes two registers of four floats
constexpr int kMasksAtOnce = 4;                     // masks in one pass over a row for one token; half as many for two
constexpr bool kReadsBytes = false;                 // weights in 8 bits are faster decoded in memory
constexpr int kTileFeatures = 3;                    // of a tile of sums: 6 sums of two registers each, of 16
constexpr int kFloat64Features = 2;                 // features of a tile of float64 sums
constexpr std::int64_t kProductsPerTask = 1 << 16;  // least work of a task: some microseconds, like waking a thread

#include "vec_portable.h"
#include "mask_table.h"

// How masks are applied to sums over a whole row, and to sums of a few products.
template <int Masks>
using RowMasks = TableMasks<Masks>;
template <int Masks>
using StepMasks = TableMasks<Masks>;

#include "row_sums.h"
#include "forward.h"

}  // namespace

Status forward_portable(const Forward& call, ParallelFor parallel_for) { return forward_any_dtype(call, parallel_for); }

}  // namespace mglu::cpu
