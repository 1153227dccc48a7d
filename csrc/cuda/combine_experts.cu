// Adds the experts' results of each token with their weights, in the order of k: out[t] = sum_k expert_weights[t, k]
// sums[t, k], without the pairs whose id is no expert. It follows experts_down.cu.
#include "element.cuh"
#include "expert_items.cuh"
#include "ptx.cuh"

namespace mglu {

struct CombineParams {
    const float* sums;           // [tokens, kTopK, out_features]
    const void* expert_ids;      // [tokens, kTopK]
    const void* expert_weights;  // [tokens, kTopK]
    void* out;                   // [tokens, out_features]
    int experts;
    int out_features;
};

constexpr int kType = MGLU_ELEMENT;
constexpr int kIdBytes = MGLU_ID_BYTES;
constexpr int kExpertWeightType = MGLU_EXPERT_WEIGHTS;
constexpr int kTopK = MGLU_TOP_K;
constexpr int kVector = MGLU_VECTOR;  // columns of a thread: 4 where they divide out_features, else 1
constexpr int kThreads = 128;

}  // namespace mglu

extern "C" __global__ void __launch_bounds__(mglu::kThreads)
    mglu_combine_experts(const __grid_constant__ mglu::CombineParams p) {
    using namespace mglu;
    let_next_kernel_start();
    wait_for_earlier_kernels();
    const int token = blockIdx.y;
    const int column = (blockIdx.x * kThreads + threadIdx.x) * kVector;
    if (column >= p.out_features) return;
    float result[kVector] = {};
#pragma unroll 8
    for (int k = 0; k < kTopK; ++k) {
        const int pair = token * kTopK + k;
        if (load_expert<kIdBytes>(p.expert_ids, pair, p.experts) < 0) continue;
        const float weight = load_expert_weight<kExpertWeightType>(p.expert_weights, pair);
        const float* sums = p.sums + static_cast<i64>(pair) * p.out_features + column;
        float sum[kVector];
        if constexpr (kVector == 4) {
            const float4 four = *reinterpret_cast<const float4*>(sums);
            sum[0] = four.x, sum[1] = four.y, sum[2] = four.z, sum[3] = four.w;
        } else {
            sum[0] = sums[0];
        }
#pragma unroll
        for (int j = 0; j < kVector; ++j) result[j] += weight * sum[j];
    }
    auto* out = static_cast<Element<kType>::Bits*>(p.out) + static_cast<i64>(token) * p.out_features + column;
    if constexpr (kVector == 4)
        store_global(out, {from_floats<kType>(result[0], result[1]), from_floats<kType>(result[2], result[3])});
    else out[0] = from_float<kType>(result[0]);
}
