// Computes the gradients of the mask weights: for every token and mask i, the sum over columns of G * R_i. G is the
// gradient of the result, and the forward pass kept R_i = dy/dr_i (training.md). A warp sums one token and mask in
// float32, in an order that depends only on the sizes.
//
// The kernel is bound by one read of R. Neighbouring warps read the same row of G, which comes from memory once.
#include "columns.cuh"

namespace mglu {

struct Params {
    const void* grad_output;  // [tokens, columns] with contiguous columns
    const void* terms;        // R [tokens, kMasks, columns] with contiguous columns
    void* out;                // [tokens, kMasks], contiguous
    i64 grad_output_row_stride;
    i64 terms_row_stride;
    i64 terms_mask_stride;
    i64 tokens;
    int columns;
};

constexpr int kType = MGLU_ELEMENT;
constexpr int kMasks = MGLU_N_MASKS;
constexpr int kMaskWeightType = MGLU_MASK_WEIGHTS;

}  // namespace mglu

extern "C" __global__ void __launch_bounds__(mglu::kThreads)
    mglu_mask_weight_gradients(const __grid_constant__ mglu::Params p) {
    using namespace mglu;
    const i64 warp = static_cast<i64>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
    const i64 token = warp / kMasks;
    const int mask = static_cast<int>(warp % kMasks);
    if (token >= p.tokens) return;
    const i64 gradient_row = token * p.grad_output_row_stride;
    const i64 terms_row = token * p.terms_row_stride + mask * p.terms_mask_stride;
    const int lane = threadIdx.x % 32;
    float sum = 0.0f;
#pragma unroll 4
    for (i64 column = lane * kOctet; column < p.columns; column += 32 * kOctet) {
        const int count = static_cast<int>(p.columns - column);
        const auto gradient = load_group<kType, kOctet>(p.grad_output, gradient_row + column, count);
        const auto term = load_group<kType, kOctet>(p.terms, terms_row + column, count);
#pragma unroll
        for (int k = 0; k < kOctet; ++k) sum = fmaf(gradient[k], term[k], sum);
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    if (lane == 0)
        static_cast<typename Element<kMaskWeightType>::Bits*>(p.out)[warp] = from_float<kMaskWeightType>(sum);
}
