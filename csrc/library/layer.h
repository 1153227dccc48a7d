// The operators on plain tensors: arguments are checked, then the kernels of csrc/cpu or csrc/cuda run.
//
// All throw std::invalid_argument with the words of mglu_ops (checks.py, masks.py) on arguments that cannot be, and
// std::runtime_error where a kernel fails. Nothing here allocates a tensor: the caller does, by `result_of`.
#pragma once

#include <string_view>
#include <vector>

#include "tensor.h"

namespace mglu {

// From torch's pool, or any other (csrc/cpu/mglu_cpu.h).
using Body = void (*)(std::int64_t begin, std::int64_t end, void* context);
using ParallelFor =
    std::int32_t (*)(std::int64_t begin, std::int64_t end, std::int64_t grain, Body body, void* context);

// Memory on the GPU for what is launched next on the stream, aligned to 16 bytes; the next call may take it back.
using Allocate = void* (*)(std::int64_t bytes, void* context);

// What runs a call: threads for the CPU; a stream (CUstream) and memory for a GPU.
struct Executor {
    ParallelFor parallel_for = nullptr;
    void* stream = nullptr;
    Allocate allocate = nullptr;
    void* context = nullptr;  // of `allocate`
};

// The arguments of mglu::forward; `route_weights` may be null.
struct Layer {
    Tensor x;
    Tensor weight;
    Tensor packed_masks;
    std::string_view activation = "silu";
    const Tensor* route_weights = nullptr;
};

// Refuses what `forward` cannot take; reads metadata only.
void check(const Layer& layer);

// Whether a tensor must be made contiguous before the kernels of its device take it. x and route_weights are folded to
// [tokens, ...], so leading dimensions must be dense.
bool needs_copy_of_x(const Layer& layer);
bool needs_copy_of_weight(const Layer& layer);
bool needs_copy_of_masks(const Layer& layer);
bool needs_copy_of_route_weights(const Layer& layer);

// The sizes of the result.
std::vector<std::int64_t> result_of(const Layer& layer);

// The layer, after `check`, on tensors that need no copy; `out` is contiguous.
void forward(const Layer& layer, const Tensor& out, const Executor& executor);

// mglu::pack_masks: masks [n_masks, d, h] or [d, h], bool or 0 and 1.
void check_masks(const Tensor& masks);
std::vector<std::int64_t> packed_sizes(const Tensor& masks);
void pack_masks(const Tensor& masks, const Tensor& out, const Executor& executor);

// mglu::unpack_masks: bool [n_masks, d, in_features].
void check_packed(const Tensor& packed_masks, std::int64_t in_features);
void unpack_masks(const Tensor& packed_masks, std::int64_t in_features, const Tensor& out, const Executor& executor);

}  // namespace mglu
