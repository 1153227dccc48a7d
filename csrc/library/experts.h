// The operators over experts on plain tensors, which mglu_ops/expert_ops.py defines. On a CPU, loops run the kernels of
// one layer for each expert that has rows, as mglu_ops/backends/expert_loop.py does, with the same bits. On a GPU,
// cuda/launch.cpp launches kernels for all experts.
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
    // The layer of the first expert, but with x [tokens, in_features] and mask_weights of all; `tokens` is T or S.
    LayerCall layer;
    Tensor routing;  // the expert ids [T, K], or offs [E] if the rows are sorted by expert
    bool is_sorted;
    std::int64_t experts;
    std::int64_t rows;                                       // S, of the result
    std::int64_t top_k;                                      // the rows of the result that share a row of x
    std::int64_t weight_stride, masks_stride, scale_stride;  // from one expert to the next, in elements

    std::vector<std::int64_t> result_sizes() const;
};

// A call of mglu::experts_down.
struct DownCall {
    Tensor y;                            // [T, K, in_features]
    Tensor weight;                       // [E, out_features, in_features] in y's dtype, or as weight_format stores it
    Tensor expert_ids;                   // [T, K]
    Tensor expert_weights;               // [T, K]
    std::optional<Tensor> weight_scale;  // as weight_format has it, with E in front; none for dense
    WeightFormat weight_format;

    std::vector<std::int64_t> result_sizes() const { return {y.sizes[0], weight.sizes[1]}; }
};

// Read metadata only. Throw std::invalid_argument if no kernel could compute the call on any layout of its tensors.
ExpertsCall describe_experts(const Tensor& x, const Tensor& weight, const Tensor& packed_masks, const Tensor& routing,
                             bool is_sorted, std::string_view activation, const std::optional<Tensor>& mask_weights,
                             const std::optional<Tensor>& weight_scale, std::string_view weight_format,
                             std::string_view activation_format);
DownCall describe_down(const Tensor& y, const Tensor& weight, const Tensor& expert_ids, const Tensor& expert_weights,
                       const std::optional<Tensor>& weight_scale, std::string_view weight_format);

// The tensors that must be made contiguous before `forward` takes them, beside the ids or offs.
Copies needed_copies(const ExpertsCall& call);

// `out` is contiguous, in x's dtype, and has `call.result_sizes()`. No tensor of the call may need a copy.
void forward(const ExpertsCall& call, const Tensor& out, const Executor& executor);

// Writes the product of y `[rows, in_features]` and an expert's transposed weight to `out`. Both are contiguous, in y's
// dtype.
using Product = std::function<void(const Tensor& y, std::int64_t expert, const Tensor& out)>;

// `out` is contiguous, in y's dtype, and has `call.result_sizes()`. All tensors of the call but the weight are
// contiguous, and so are the weight's rows; on a GPU all of the weight is, and y and the weight start at multiples of 16
// bytes. On a CPU `product` multiplies dense weights, but not in float16, of experts that have more than a few rows.
void experts_down(const DownCall& call, const Tensor& out, const Executor& executor, const Product& product);

}  // namespace mglu
