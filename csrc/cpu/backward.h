// The elementwise steps of the backward pass in bfloat16, between the GEMMs, which torch runs
// (mglu_ops/backends/cpu/backward.py).
//
// mglu_ops/backends/gradients.py has the equations, and defines F_i, G, P, Q_i, R_i and D_i. Here grad_t is dt = G * P,
// and grad_f_i is b_i = G * Q_i.
//
// Each step computes in float32 and rounds its result once; subnormal numbers may count as 0. Sizes and strides count
// elements. A stride is the distance between two rows; the elements of a row are contiguous. Pointers need only the
// alignment of their element. All functions need AVX512-BF16, and return Status::unsupported_isa without it. The rules
// on threads and exceptions in mglu_cpu.h hold here too.
#pragma once

#include "mglu_cpu.h"

namespace mglu::cpu {

// Writes W and then F_i * W for each mask: the weights of the GEMM for grad_x, stacked. Multiplying by F_i flips sign
// bits.
struct FlipSigns {
    const void* weight;                // [out_features, in_features]
    const std::uint8_t* packed_masks;  // contiguous
    void* out;                         // [n_masks + 1, out_features, in_features], contiguous
    std::int64_t n_masks;
    std::int64_t out_features;
    std::int64_t in_features;
    std::int64_t weight_stride;
};
Status flip_signs(const FlipSigns& call, ParallelFor parallel_for);

// Multiplies G with P and each Q_i, which are the `entries` of `partials`. The products are grad_t and each grad_f_i.
struct Scale {
    const void* grad_output;  // [tokens, columns]
    const void* partials;     // [tokens, entries, columns]
    void* out;                // [tokens, entries, columns], contiguous
    std::int64_t tokens;
    std::int64_t entries;
    std::int64_t columns;
    std::int64_t grad_stride;
    std::int64_t partials_stride;  // from one token to the next
    std::int64_t entry_stride;
};
Status scale(const Scale& call, ParallelFor parallel_for);

// Writes grad_weight, the gradients of the mask logits, or both, from the products D_0 and D_i.
struct WeightGradients {
    const void* total;     // D_0 [out_features, in_features] of total_dtype, contiguous; read for grad_weight
    const void* products;  // D_i [n_masks, out_features, in_features], contiguous
    const void* weight;    // [out_features, in_features]; read for grad_logits
    const std::uint8_t* packed_masks;  // contiguous; read for grad_weight
    void* grad_weight;                 // [out_features, in_features], contiguous; nullptr if it is not needed
    void* grad_logits;                 // [n_masks, out_features, in_features] of logits_dtype, or nullptr
    std::int64_t n_masks;
    std::int64_t out_features;
    std::int64_t in_features;
    std::int64_t weight_stride;
    std::int64_t logits_stride;  // from one mask to the next; the rows of a mask are contiguous
    DType total_dtype;           // float32 or bfloat16
    DType logits_dtype;          // float32 or bfloat16
};
Status weight_gradients(const WeightGradients& call, ParallelFor parallel_for);

// Writes the gradients of the mask weights. The order of summation depends only on `columns`.
struct MaskWeightGradients {
    const void* grad_output;  // [tokens, columns]
    const void* terms;        // R [tokens, n_masks, columns]
    float* out;               // [tokens, n_masks], contiguous
    std::int64_t tokens;
    std::int64_t n_masks;
    std::int64_t columns;
    std::int64_t grad_stride;
    std::int64_t terms_stride;  // from one token to the next
    std::int64_t mask_stride;
};
Status mask_weight_gradients(const MaskWeightGradients& call, ParallelFor parallel_for);

}  // namespace mglu::cpu
