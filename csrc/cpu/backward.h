// The elementwise steps of a backward pass in bfloat16, between library GEMMs (mglu_ops/backends/cpu/backward.py). F_i
// is -1 where M_i = 1 and 1 elsewhere, G is the gradient of the result, and forward kept the partial derivatives P and
// Q_i:
//
//   dt = G * P,  b_i = G * Q_i,  D_0 = dt^T x,  D_i = b_i^T x,
//   dx = dt W + sum_i b_i (F_i * W),  dW = D_0 + sum_i F_i * D_i,  dlogits_i = -2 W * D_i,  dr_i = sum_d G * R_i
//
// Arithmetic is in float32 and rounded once; subnormal numbers may count as 0. Sizes and strides count elements. A
// stride is the distance between two rows, and the elements of a row are contiguous. Pointers need only the alignment
// of their element. Otherwise mglu_cpu.h's rules hold. All functions need AVX512-BF16, and return
// Status::unsupported_isa where `supports(Isa::avx512_bf16, DType::bfloat16)` is false.
#pragma once

#include "mglu_cpu.h"

namespace mglu::cpu {

// Writes W, and F_i * W for every mask: the stacked weights of the GEMM for dx. A product with F_i flips sign bits.
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

// Writes the products of G and some partial derivatives, which are dt and b_i.
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

// Writes dW and every dlogits_i, or one of them, from the products D.
struct WeightGradients {
    const void* total;                 // D_0 [out_features, in_features] of total_dtype, contiguous; for dW
    const void* products;              // D_i [n_masks, out_features, in_features], contiguous
    const void* weight;                // [out_features, in_features]; for dlogits
    const std::uint8_t* packed_masks;  // contiguous; for dW
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

// Writes dr_i. The order of a sum depends on `columns` alone.
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
