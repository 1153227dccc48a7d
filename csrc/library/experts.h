// The operators over experts (mglu_ops/ops.py) on plain tensors. On a CPU, csrc/cpu/experts.h has the loop over the
// experts that have rows. On a GPU, each launch of cuda/launch.cpp computes all experts.
#pragma once

#include <functional>
#include <optional>
#include <string_view>
#include <vector>

#include "executor.h"
#include "layer_call.h"

namespace mglu {

// A call of mglu::experts_forward or mglu::grouped_forward.
struct ExpertsCall {
    // The layer of the first expert: its weight, masks and scales, but the x and mask_weights of all experts. `tokens`
    // is the number of rows of x, T or (for grouped_forward) S.
    LayerCall layer;
    Tensor routing;  // the expert ids [T, K], or offs [E] if the rows are sorted by expert
    bool is_sorted;
    std::int64_t experts;
    std::int64_t rows;                                       // rows of the result: T * K, or S
    std::int64_t top_k;                                      // consecutive rows of the result that share a row of x
    std::int64_t weight_stride, masks_stride, scale_stride;  // from one expert to the next, in elements

    std::vector<std::int64_t> result_sizes() const;
};

// A call of mglu::experts_down.
struct DownCall {
    Tensor y;                            // [T, K, in_features]
    Tensor weight;                       // [E, out_features, in_features] in y's dtype, or as weight_format stores it
    Tensor expert_ids;                   // [T, K]
    Tensor expert_weights;               // [T, K]
    std::optional<Tensor> weight_scale;  // the scales of weight_format, with E as first size; none for dense
    WeightFormat weight_format;

    std::vector<std::int64_t> result_sizes() const { return {y.sizes[0], weight.sizes[1]}; }
};

// Both functions read only metadata. They throw std::invalid_argument if no kernel could compute the call even with
// contiguous tensors.
ExpertsCall describe_experts(const Given<Tensor>& given);
DownCall describe_down(const Tensor& y, const Tensor& weight, const Tensor& expert_ids, const Tensor& expert_weights,
                       const std::optional<Tensor>& weight_scale, std::string_view weight_format);

// Returns which tensors must be made contiguous before `forward` takes them.
Copies needed_copies(const ExpertsCall& call);

// `out` is contiguous, in x's dtype, and has `call.result_sizes()`. No tensor may be in `needed_copies(call)`.
void forward(const ExpertsCall& call, const Tensor& out, const Executor& executor);

// Multiplies y `[rows, in_features]` with an expert's transposed weight. y and `out` are contiguous, in y's dtype.
using Product = std::function<void(const Tensor& y, std::int64_t expert, const Tensor& out)>;

// `out` is contiguous, in y's dtype, and has `call.result_sizes()`. All other tensors must be contiguous, except the
// weight on a CPU, where contiguous rows are enough. On a GPU, y and the weight must start at multiples of 16 bytes. On
// a CPU, `product` multiplies for experts with more than a few rows, if their weights are dense and y is not float16.
void experts_down(const DownCall& call, const Tensor& out, const Executor& executor, const Product& product);

}  // namespace mglu
