// Adds the weighted products of each token's experts, in the order of k:
//
//   out[t] = sum_k expert_weights[t, k] products[t, k]
//
// A (token, expert) pair whose id is out of range adds nothing. The kernel runs after experts_down.cu or after torch's
// grouped_mm.
#include "element.cuh"
#include "expert_items.cuh"
#include "params.cuh"
#include "ptx.cuh"

namespace mglu {

constexpr int kType = MGLU_ELEMENT;
constexpr int kExpertWeightType = MGLU_EXPERT_WEIGHTS;
constexpr int kProductType = MGLU_PRODUCTS;  // an ElementType: kFloat32, or kType
constexpr int kTopK = MGLU_TOP_K;
constexpr int kVector = MGLU_VECTOR;   // columns of a thread: 4 if out_features is a multiple of 4, else 1
constexpr int kParts = MGLU_PARTS;     // maximum split-K; experts_down writes each part's products to its own array
constexpr int kRows = MGLU_PART_ROWS;  // columns of `out` in a tile of experts_down, which has one number of parts
constexpr int kThreads = 128;

template <typename Bits>
struct alignas(sizeof(Bits) * kVector) Vector {
    Bits bits[kVector];
};

}  // namespace mglu

extern "C" __global__ void __launch_bounds__(mglu::kThreads)
    mglu_combine_experts(const __grid_constant__ mglu::CombineParams p) {
    using namespace mglu;
    let_next_kernel_start();
    wait_for_earlier_kernels();
    const int token = blockIdx.x;
    const int column = (blockIdx.y * kThreads + threadIdx.x) * kVector;
    if (column >= p.out_features) return;
    const i64 array = static_cast<i64>(gridDim.x) * kTopK * p.out_features;
    float result[kVector] = {};
#pragma unroll 8
    for (int k = 0; k < kTopK; ++k) {
        const int pair = token * kTopK + k;
        if (expert_of(p.expert_ids, p.id_bytes, pair, p.experts) == p.experts) continue;
        const float weight = load_expert_weight<kExpertWeightType>(p.expert_weights, pair);
        const i64 row = p.places == nullptr ? pair : p.places[pair];
        using Product = Element<kProductType>::Bits;
        const auto* products = static_cast<const Product*>(p.products);
        int parts = 1;
        if constexpr (kParts > 1) {
            const int tiles = (p.out_features + kRows - 1) / kRows;
            parts =
                reinterpret_cast<const u8*>(products + kParts * array)[static_cast<i64>(pair) * tiles + column / kRows];
        }
        float product[kVector] = {};
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            if (part > 0 && part >= parts) continue;
            const auto own =
                *reinterpret_cast<const Vector<Product>*>(products + part * array + row * p.out_features + column);
#pragma unroll
            for (int j = 0; j < kVector; ++j) product[j] += to_float<kProductType>(own.bits[j]);
        }
#pragma unroll
        for (int j = 0; j < kVector; ++j) result[j] += weight * product[j];
    }
    auto* out = static_cast<Element<kType>::Bits*>(p.out) + static_cast<i64>(token) * p.out_features + column;
    if constexpr (kVector == 4)
        store_global(out, {from_floats<kType>(result[0], result[1]), from_floats<kType>(result[2], result[3])});
    else out[0] = from_float<kType>(result[0]);
}
