// LayerCall describes a call of mglu::forward. `describe` checks the call and builds the LayerCall, from which the
// needed copies, the sizes of the result, the kernel and its launch follow.
#pragma once

#include <optional>
#include <string_view>
#include <vector>

#include "../cuda/weight_formats.cuh"
#include "tensor.h"

namespace mglu {

// The arguments of a forward operator that are not tensors.
struct Options {
    std::string_view activation = "silu", weight_format = "dense", activation_format = "dense";
    bool is_sorted = false;  // true for grouped_forward
};

// The arguments of a forward operator, with tensors of type T: Tensor, or torch's handles (mglu_ops/given.py).
template <typename T>
struct Given : Options {
    T x{};                            // [..., in_features]
    T weight{};                       // [out_features, in_features] in x's dtype, or as weight_format stores it
    T packed_masks{};                 // [out_features, ceil(in_features / 8), n_masks]
    std::optional<T> mask_weights{};  // [..., n_masks]
    std::optional<T> weight_scale{};  // the scales of weight_format (mglu_ops/formats.py); none for dense
    std::optional<T> routing{};       // expert_ids for experts_forward, offs for grouped_forward, none for forward

    // Reads the optional arguments of a schema, of which forward_ste has those of a layer with a dense weight.
    template <typename Arguments>
    void read_options(Arguments& arguments, bool is_stored) {
        activation = arguments.text();
        mask_weights = arguments.optional_tensor();
        if (!is_stored) return;
        weight_scale = arguments.optional_tensor();
        weight_format = arguments.text();
        activation_format = arguments.text();
    }
};

// result = sum_i r_i * act(x (M_i * W)^T) * (x ((1 - M_i) * W)^T),   i = 0 .. n_masks - 1
//
// Kernels see x as [tokens, in_features] and mask_weights r as [tokens, n_masks]. The row strides below are for these
// shapes, and are valid only for tensors that `needed_copies` does not name.
struct LayerCall : Given<Tensor> {
    WeightFormat format;
    bool rounds_x;        // x is rounded to fp8_token (mglu_ops/formats.py)
    int activation_code;  // as in csrc/cpu/activation.h
    std::int64_t tokens;
    std::int64_t out_features;
    std::int64_t in_features;
    std::int64_t n_masks;
    std::int64_t x_row_stride;            // in elements
    std::int64_t mask_weight_row_stride;  // in elements; 0 without mask_weights

    std::vector<std::int64_t> result_sizes() const;
};

// Reads only metadata. Throws std::invalid_argument if no kernel could compute the call even with contiguous tensors.
LayerCall describe(const Given<Tensor>& given);

// Checks the mask weights of a call that has some against the sizes of its result, and sets mask_weight_row_stride.
void check_mask_weights(LayerCall& call, const std::vector<std::int64_t>& result_sizes);

// Checks of single arguments, which the operators over experts use too. They throw std::invalid_argument. Messages call
// the checked tensor `argument`.
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
