// LayerCall describes a call of mglu::forward. `describe` checks the call and builds the LayerCall. The needed copies,
// the sizes of the result, the kernel and its launch are derived from it.
#pragma once

#include <optional>
#include <string_view>
#include <vector>

#include "../cuda/weight_formats.cuh"
#include "tensor.h"

namespace mglu {

// What a forward operator is given, as tensors or as torch's handles of tensors (mglu_ops/given.py).
template <typename T>
struct Given {
    T x{}, weight{}, packed_masks{};
    std::string_view activation = "silu";
    std::optional<T> mask_weights{}, weight_scale{};
    std::string_view weight_format = "dense", activation_format = "dense";
    std::optional<T> routing{};  // expert_ids for experts_forward, offs for grouped_forward, none for forward
    bool is_sorted = false;      // true for grouped_forward
};

// result = sum_i r_i * act(x (M_i * W)^T) * (x ((1 - M_i) * W)^T),   i = 0 .. n_masks - 1
//
// The leading dimensions of x and mask_weights are flattened to [tokens, ...]. A row stride is valid only if its tensor
// is not in `needed_copies`.
struct LayerCall {
    Tensor x;                            // [..., in_features]
    Tensor weight;                       // [out_features, in_features] in x's dtype, or as weight_format stores it
    Tensor packed_masks;                 // [out_features, ceil(in_features / 8), n_masks]
    std::optional<Tensor> mask_weights;  // [..., n_masks]
    std::optional<Tensor> weight_scale;  // the scales of weight_format (mglu_ops/formats.py); none for dense
    WeightFormat weight_format;
    bool rounds_x;   // x is rounded to fp8_token (mglu_ops/formats.py)
    int activation;  // its code in csrc/cpu/activation.h
    std::int64_t tokens;
    std::int64_t out_features;
    std::int64_t in_features;
    std::int64_t n_masks;
    std::int64_t x_row_stride;            // in elements
    std::int64_t mask_weight_row_stride;  // in elements; 0 without mask_weights

    std::vector<std::int64_t> result_sizes() const;
};

// Reads metadata only. Throws std::invalid_argument if no kernel could compute the call, whatever the strides of its
// tensors.
LayerCall describe(const Given<Tensor>& given);

// The operators over experts use these checks too. `argument` is the name of x in messages. All checks throw
// std::invalid_argument.
struct Format;
const Format& find_format(std::string_view weight_format);
void check_x_and_weight(const char* argument, const Tensor& x, const Tensor& weight, const Format& format);
void check_scale(const std::optional<Tensor>& scale, const Tensor& x, const Tensor& weight, const Format& format);
void check_device(const char* argument, const Tensor& tensor, const Tensor& x, const char* name_of_x = "x");

// The tensors that must be made contiguous before a kernel of their device can take them.
struct Copies {
    bool x, weight, packed_masks, mask_weights, weight_scale, routing;

    bool any() const { return x || weight || packed_masks || mask_weights || weight_scale || routing; }
};
Copies needed_copies(const LayerCall& call);

}  // namespace mglu
