// Any CPU, by the vector extension of GCC and Clang.
#include <type_traits>
#include <utility>

#include "kernels.h"

namespace mglu::cpu {
namespace {

constexpr int kSumRegisters = 8;                   // a Vec is two registers of 16 or 32 where they hold four floats
constexpr int kMasksAtOnce = 4;                    // of one token; half as many of two
constexpr std::int64_t kFewTokens = 4;             // more are faster in many_tokens.h
constexpr int kFeaturesOfWideTile = 3;             // 6 sums of two registers each, of 16
constexpr int kFeaturesOfWideSums = 2;             // as many registers of float64 sums
constexpr std::int64_t kWorkOfTask = 1 << 16;      // products; some microseconds, as a thread's wake-up

#include "unrolled.h"
#include "element.h"
#include "vec_portable.h"

#include "mask_factors.h"

#include "mask_table.h"

// For parts that are added up over a whole row, and for those of a few products.
template <int Masks>
using LongMasks = TableMasks<Masks>;
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

Status forward_portable(const Forward& call, ParallelFor parallel_for) { return forward_here(call, parallel_for); }

}  // namespace mglu::cpu
