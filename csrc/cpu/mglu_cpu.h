// MGLU on CPUs: the interface of csrc/cpu. C++17 and nothing else: no torch, no Python, no OpenMP. README.md describes
// the kernels.
//
// out = sum_i  r_i * act(x (M_i * W)^T) * (x ((1 - M_i) * W)^T),   i = 0 .. n_masks - 1
//
// M_i is mask i (0 or 1), W is the weight and r_i is the mask weight of a token, 1 by default. Without masks (n_masks
// 0), out = x W^T in float32, which the down projections of experts need.
//
// Build all .cpp files of this folder with the same flags (-O2 -std=c++17 -fPIC -ffp-contract=off, g++ or clang++),
// without -ffast-math and -march. A file that needs an instruction set enables it for itself. At run time, `forward`
// picks an instruction set that the CPU and the operating system support.
//
// The caller provides the threads. All work goes through a `ParallelFor`. A caller that passes torch's stable
// `torch_parallel_for` (torch >= 2.10), which has this type, uses torch's thread pool and the limit of
// torch.set_num_threads. The result has the same bits for any number of threads. No function throws, keeps state
// between calls or writes to its inputs, and all functions may be called from several threads at the same time.
#pragma once

#include <cstdint>

#include "../cuda/weight_formats.cuh"

namespace mglu::cpu {

// Every field of the structs below is 8 bytes wide, so that callers in other languages can lay out the structs without
// a compiler. Enums that are fields therefore have 8 bytes; Status is only returned.
enum class DType : std::int64_t { float32 = 0, bfloat16 = 1, float16 = 2 };

enum class Activation : std::int64_t {
#define MGLU_ACTIVATION(name, code, ...) name = code,
#include "activation.h"
};

enum class Status : std::int32_t {
    ok = 0,
    invalid_argument = 1,     // a negative size, n_masks outside 0 .. 16, an unknown dtype, activation or ISA
    out_of_memory = 2,        // no scratch memory; `out` is partly written
    parallel_for_failed = 3,  // the caller's ParallelFor returned an error; `out` is partly written
    unsupported_isa = 4,      // the ISA asked for is not in this build or not on this machine
};

// Instruction sets. avx512_bf16 and amx serve only bfloat16.
enum class Isa : std::int64_t { best = 0, portable = 1, avx2 = 2, avx512 = 3, avx512_bf16 = 4, amx = 5 };

// A ParallelFor divides [begin, end) into ranges of at least `grain` indices (one range if there are fewer), calls
// `body` once for each range, on any threads, and returns 0 when all ranges are done. `serial` below is one.
using Body = void (*)(std::int64_t begin, std::int64_t end, void* context);
using ParallelFor = std::int32_t (*)(std::int64_t begin, std::int64_t end, std::int64_t grain, Body body,
                                     void* context);

// One call of the layer. Sizes and strides count elements, and strides may be 0 or negative. Pointers need only the
// alignment of their element. The last dimension of x, weight, packed_masks and out is contiguous.
struct Forward {
    const void* x;                     // [tokens, in_features] of dtype
    const void* weight;                // [out_features, in_features] in weight_format; dense weights have dtype
    const std::uint8_t* packed_masks;  // the packed format (csrc/cuda/packed_masks.cuh); padding bits are ignored
    const void* mask_weights;          // [tokens, n_masks] of mask_weights_dtype, or nullptr if all are 1
    const void* weight_scale;          // the scales of weight_format; nullptr if dense, or if there are no scales
    void* out;                         // [tokens, out_features] of dtype, or float32 without masks; overlaps no input
    void* partials;                    // nullptr, or in training [tokens, partials_of(call), out_features] of dtype
    std::int64_t tokens;
    std::int64_t out_features;
    std::int64_t in_features;
    std::int64_t n_masks;                  // 1 to 16; 0 for x W^T without masks, mask weights and activation
    std::int64_t x_stride;                 // from one token to the next
    std::int64_t weight_stride;            // from one output feature to the next, in stored elements
    std::int64_t mask_stride;              // from one output feature to the next, in bytes
    std::int64_t mask_weight_stride;       // from one token to the next
    std::int64_t mask_weight_mask_stride;  // from one mask to the next
    std::int64_t out_stride;               // from one token to the next
    DType dtype;
    DType mask_weights_dtype;  // ignored if mask_weights is nullptr
    WeightFormat weight_format;
    Activation activation;
    Isa isa;  // `best`, or the instruction set that must be used (tests, tuning)
};

// The number of partial derivatives that training keeps for each element y of `out`. y is a function of t = x W^T and
// f_i = x (F_i * W)^T, where F_i is -1 where M_i = 1 and 1 elsewhere: gate_i = (t - f_i) / 2 and value_i = (t + f_i) /
// 2. The partial derivatives are
//   dy/dt = sum_i r_i (act'(gate_i) value_i + act(gate_i)) / 2,
//   dy/df_i = r_i (act(gate_i) - act'(gate_i) value_i) / 2 for each i,
//   dy/dmask_weight_i = act(gate_i) value_i for each i, if there are mask weights.
constexpr std::int64_t partials_of(const Forward& call) { return 1 + (call.mask_weights ? 2 : 1) * call.n_masks; }

// Runs the layer. Training needs in_features > 0. Sums are in float32 or float64; a value that is small compared with
// its gate is summed again alone (small_values.h). The result is NaN wherever the naive layer, which multiplies by the
// masks, has NaN because of NaN or infinity in x or weight. A gate that overflows float32 does not change the value of
// the same mask.
Status forward(const Forward& call, ParallelFor parallel_for);

// A call over experts. The Forward that goes with it describes the layer of expert 0, with the x of all tokens, and the
// mask weights, the result and the partial derivatives of all rows. The result and the partial derivatives are
// contiguous.
struct Experts {
    const void* index;         // expert_ids [tokens, top_k], or if is_sorted the end of each expert's rows, [experts]
    std::int64_t index_bytes;  // of an id or an end: 4 or 8
    std::int64_t is_sorted;    // 1 if the rows are sorted by expert
    std::int64_t experts;
    std::int64_t rows;          // rows of the result: tokens * top_k, or the tokens if is_sorted
    std::int64_t top_k;         // consecutive rows of the result that share a token; 1 if is_sorted
    std::int64_t weight_bytes;  // from one expert's weight to the next
    std::int64_t mask_bytes;    // from one expert's packed masks to the next
    std::int64_t scale_bytes;   // from one expert's scales to the next
};

// Runs `forward` for each expert that has rows. Rows without an expert are zeros. Training needs sorted rows.
Status forward_experts(const Forward& first, const Experts& experts, ParallelFor parallel_for);

// How masks are given: as bytes, where nonzero counts as 1, or as logits, whose masks are `logit > 0`.
enum class MaskSource : std::int64_t { bytes = 0, float32 = 1, bfloat16 = 2, float16 = 3 };

// Packs masks. `masks` is [n_masks, out_features, in_features] with the given strides in bytes; `packed_masks` is
// contiguous, and its padding bits become 0.
struct Pack {
    const std::uint8_t* masks;
    std::uint8_t* packed_masks;
    std::int64_t n_masks;
    std::int64_t out_features;
    std::int64_t in_features;
    std::int64_t mask_stride;    // from one mask to the next
    std::int64_t row_stride;     // from one output feature to the next
    std::int64_t column_stride;  // from one input feature to the next
    MaskSource source = MaskSource::bytes;
};
Status pack_masks(const Pack& call, ParallelFor parallel_for);

// Unpacks masks. `masks` is contiguous, one byte (0 or 1) each; `packed_masks` has the given strides in bytes.
struct Unpack {
    const std::uint8_t* packed_masks;
    std::uint8_t* masks;
    std::int64_t n_masks;
    std::int64_t out_features;
    std::int64_t in_features;
    std::int64_t row_stride;    // from one output feature to the next
    std::int64_t octet_stride;  // from 8 input features to the next 8
    std::int64_t mask_stride;   // from one mask to the next
};
Status unpack_masks(const Unpack& call, ParallelFor parallel_for);

// True if `forward` can run with `isa` for this dtype on this machine; always true for `best`.
bool supports(Isa isa, DType dtype);

// The instruction set that `best` chooses. It depends on the types of x and W, and in bfloat16 on the numbers of tokens
// and masks.
Isa best_isa(DType dtype, std::int64_t tokens, std::int64_t n_masks, WeightFormat weight_format);

// A message that says what a Status means, without a full stop.
const char* status_message(Status status);

// A ParallelFor that runs everything on the calling thread.
std::int32_t serial(std::int64_t begin, std::int64_t end, std::int64_t grain, Body body, void* context);

}  // namespace mglu::cpu
