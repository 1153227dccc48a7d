// MGLU on CPUs: the interface of csrc/cpu. C++17 and nothing else: no torch, no Python, no OpenMP.
//
//   out = sum_i  route_i * act(x (M_i * W)^T) * (x ((1 - M_i) * W)^T),   i = 0 .. n_masks - 1
//
// Every .cpp of this folder goes into the build, all with the same flags (-O2 -std=c++17 -fPIC -ffp-contract=off, g++
// or clang++): a file that needs an instruction set says so itself, and `forward` picks one at run time by what CPU and
// system support. No -ffast-math and no -march.
//
// Threads are the caller's: all work goes through a `ParallelFor`, whose type is that of torch's stable
// `torch_parallel_for` (torch >= 2.10), so that torch's pool, and torch.set_num_threads, serve here. The result does
// not depend on the number of threads, bit for bit. Nothing here throws, keeps state between calls or writes to its
// inputs, and every function may be called from several threads at once.
#pragma once

#include <cstdint>

namespace mglu::cpu {

// All fields are 8 bytes wide, so that a caller in another language can lay the structs out without a compiler.
enum class DType : std::int64_t { float32 = 0, bfloat16 = 1, float16 = 2 };

enum class Activation : std::int64_t {
#define MGLU_ACTIVATION(name, code, ...) name = code,
#include "activation.h"
};

enum class Status : std::int32_t {
    ok = 0,
    invalid_argument = 1,      // a size below 0, n_masks outside 1 .. 16, an unknown dtype, activation or ISA
    out_of_memory = 2,         // scratch memory; `out` is partly written
    parallel_for_failed = 3,   // the caller's ParallelFor returned an error; `out` is partly written
    unsupported_isa = 4,       // an ISA was asked for that this build or this machine lacks
};

// Instruction sets. Those of bfloat16 alone: avx512_bf16 and amx.
enum class Isa : std::int64_t { best = 0, portable = 1, avx2 = 2, avx512 = 3, avx512_bf16 = 4, amx = 5 };

// Calls `body` on disjoint ranges [begin, end) that cover [begin, end) of the call, each once, on any threads, and
// returns 0 when all are done. Ranges hold at least `grain` items where there are as many. `serial` below is one.
using Body = void (*)(std::int64_t begin, std::int64_t end, void* context);
using ParallelFor = std::int32_t (*)(
    std::int64_t begin, std::int64_t end, std::int64_t grain, Body body, void* context);

// One call of the layer. Sizes and strides are in elements, strides may be 0 or negative, pointers need no alignment
// beyond that of their element, and the last dimension of x, weight, packed_masks and out is contiguous.
struct Forward {
    const void* x;                      // [tokens, in_features] of dtype
    const void* weight;                 // [out_features, in_features] of dtype
    const std::uint8_t* packed_masks;   // [out_features, ceil(in_features / 8), n_masks]: bit k % 8 of byte
                                        // [r, k / 8, i] is M_i[r, k]; padding bits are ignored
    const void* route_weights;          // [tokens, n_masks] of route_dtype, or nullptr for a weight of 1 each
    void* out;                          // [tokens, out_features] of dtype; overlaps no input
    std::int64_t tokens;
    std::int64_t out_features;
    std::int64_t in_features;
    std::int64_t n_masks;               // 1 to 16
    std::int64_t x_stride;              // from one token to the next
    std::int64_t weight_stride;         // from one output feature to the next
    std::int64_t mask_stride;           // from one output feature to the next, in bytes
    std::int64_t route_stride;          // from one token to the next
    std::int64_t route_mask_stride;     // from one mask to the next
    std::int64_t out_stride;            // from one token to the next
    DType dtype;
    DType route_dtype;                  // read only where route_weights is given
    Activation activation;
    Isa isa;                            // `best`, or one to insist on (tests, tuning)
};

// The layer. Products are summed in float32; NaN and infinity in x or weight come out as NaN wherever the naive layer
// (which multiplies by the masks) has them. Returns Status::ok at once where the result is empty.
Status forward(const Forward& call, ParallelFor parallel_for);

// What masks are made of: one byte each (bool, or 0 and 1: what is not 0 counts as 1), or logits, whose masks are > 0.
enum class MaskSource : std::int64_t { bytes = 0, float32 = 1, bfloat16 = 2, float16 = 3 };

// Masks to bits. `masks` is [n_masks, out_features, in_features] with the given strides in bytes; `packed_masks` is
// contiguous, padding bits are written as 0.
struct Pack {
    const std::uint8_t* masks;
    std::uint8_t* packed_masks;
    std::int64_t n_masks;
    std::int64_t out_features;
    std::int64_t in_features;
    std::int64_t mask_stride;           // from one mask to the next
    std::int64_t row_stride;            // from one output feature to the next
    std::int64_t column_stride;         // from one input feature to the next
    MaskSource source = MaskSource::bytes;
};
Status pack_masks(const Pack& call, ParallelFor parallel_for);

// Bits to masks, the inverse: `masks` is contiguous, one byte (0 or 1) each; `packed_masks` has strides in bytes.
struct Unpack {
    const std::uint8_t* packed_masks;
    std::uint8_t* masks;
    std::int64_t n_masks;
    std::int64_t out_features;
    std::int64_t in_features;
    std::int64_t row_stride;            // from one output feature to the next
    std::int64_t octet_stride;          // from one byte's eight input features to the next eight
    std::int64_t mask_stride;           // from one mask to the next
};
Status unpack_masks(const Unpack& call, ParallelFor parallel_for);

// Whether `forward` can run with an instruction set here (`best`: always), and which one `best` is for a call: it
// depends on the type, and in bfloat16 on tokens and masks.
bool supports(Isa isa, DType dtype);
Isa best_isa(DType dtype, std::int64_t tokens, std::int64_t n_masks);

// "portable", "avx2", "avx512", "avx512_bf16" or "amx"; "best" for Isa::best.
const char* isa_name(Isa isa);

// A sentence for a Status, without a full stop.
const char* status_message(Status status);

// A ParallelFor that runs everything on the calling thread.
std::int32_t serial(std::int64_t begin, std::int64_t end, std::int64_t grain, Body body, void* context);

}  // namespace mglu::cpu
