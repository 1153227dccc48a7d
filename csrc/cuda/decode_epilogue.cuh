// The epilogue of decode_mma.cu: adds the split-K parts, applies the activation and mask weights, sums over masks and
// stores the result.
#pragma once
#include "activation.cuh"
#include "element.cuh"
#include "params.cuh"
#include "ptx.cuh"
#include "mask_weights.cuh"
#include "weight_format.cuh"

namespace mglu {

// The shape of a block, which has kTiles tiles of kRows rows of W. kParts neighbouring warps share a tile, each with a
// part of k. Each warp has left its sums in shared memory, kWarpBytes apart, as float [1 + kMasks][kRows][kColumns], or
// with kRowsFirst [1 + kMasks][kColumns][kRows]. The first of these matrices is t = x W^T, and the others are the s_i =
// x (M_i * W)^T of each mask.
template <int kType_, WeightFormat kFormat_, int kMasks_, Activation kActivation_, int kMaskWeightType_, int kTiles_,
          int kParts_, int kRows_, int kColumns_, int kWarpBytes_, bool kRowsFirst_>
struct EpilogueShape {
    static constexpr int kType = kType_;
    static constexpr WeightFormat kFormat = kFormat_;
    static constexpr int kMasks = kMasks_;
    static constexpr Activation kActivation = kActivation_;
    static constexpr int kMaskWeightType = kMaskWeightType_;  // -1: no mask weights
    static constexpr int kTiles = kTiles_;
    static constexpr int kParts = kParts_;
    static constexpr int kRows = kRows_;
    static constexpr int kColumns = kColumns_;
    static constexpr int kWarpBytes = kWarpBytes_;
    static constexpr int kThreads = 32 * kTiles * kParts;  // threads of the block

    // With kRowsFirst, neighbouring threads compute neighbouring rows, so that their stores are coalesced.
    static constexpr bool kRowsFirst = kRowsFirst_;

    // The index of a sum among the sums of one product (t or an s_i). The threads of a warp write and read different
    // banks.
    static __device__ __forceinline__ int index_of_sum(int token, int row) {
        const int index = kRowsFirst ? token * kRows + row : row * kColumns + token;
        return kRowsFirst ? index ^ index / 32 % 4 * 8 : index;
    }
};

// Adds the split-K parts in a fixed order, so that every run gives the same bits.
template <typename Shape>
__device__ __forceinline__ float sum_of_parts(const u8* parts, int offset) {
    float sum = 0.0f;
#pragma unroll
    for (int part = 0; part < Shape::kParts; ++part)
        sum += reinterpret_cast<const float*>(parts + part * Shape::kWarpBytes)[offset];
    return sum;
}

// Computes and stores the block's outputs. The terms of an output's masks are summed in a fixed order: each of
// kPartialSums partial sums adds every kPartialSums-th mask, and then the partial sums are added pairwise. If a block
// has more threads than outputs, kMaskLanes neighbouring lanes share an output, which shortens the kernel's tail. As in
// decode_mma.cu, a tile that would run past the last row starts at an earlier row. `rows` maps tokens to rows of the
// result. `scales` are the scales of the block's rows of W, if the format has them.
template <typename Shape, typename Rows>
__device__ __forceinline__ void decode_epilogue(const Params& p, const Rows& rows, const float* scales, const u8* sums,
                                                int first_row) {
    constexpr int kMasks = Shape::kMasks;
    constexpr int kOutputs = Shape::kTiles * Shape::kRows * Shape::kColumns;
    constexpr int kPartialSums = kMasks > 8 && 16 * kOutputs <= Shape::kThreads ? 16
                                 : kMasks >= 8                                  ? 8
                                 : kMasks >= 4                                  ? 4
                                 : kMasks >= 2                                  ? 2
                                                                                : 1;
    constexpr int kThreadsPerOutput = Shape::kThreads / kOutputs;  // rounded down
    constexpr int kUsableLanes = kThreadsPerOutput >= 16  ? 16
                                 : kThreadsPerOutput >= 8 ? 8
                                 : kThreadsPerOutput >= 4 ? 4
                                 : kThreadsPerOutput >= 2 ? 2
                                                          : 1;
    constexpr int kMaskLanes = kUsableLanes < kPartialSums ? kUsableLanes : kPartialSums;
    constexpr int kLanePartialSums = kPartialSums / kMaskLanes;  // partial sums that a lane holds
    constexpr int kPlane = Shape::kRows * Shape::kColumns;
    constexpr int kOutputsAtOnce = Shape::kThreads / kMaskLanes;
    int thread = threadIdx.x;
    // This keeps the compiler from computing addresses before the mainloop, which has no registers to spare.
    if constexpr (Shape::kRowsFirst) keep_in_register(thread);
    const int mask_lane = thread % kMaskLanes;
    for (int base = 0; base < kOutputs; base += kOutputsAtOnce) {
        const int output = base + thread / kMaskLanes;
        const int tile = output / kPlane;
        const int token = Shape::kRowsFirst ? output % kPlane / Shape::kRows : output % Shape::kColumns;
        const int row =
            first_row + (Shape::kRowsFirst ? tile * Shape::kRows + output % Shape::kRows : output / Shape::kColumns);
        const bool wanted = output < kOutputs && token < p.tokens && row < p.out_features;
        float sum[kLanePartialSums] = {};
        if (wanted) {
            const u8* parts = sums + tile * (Shape::kParts * Shape::kWarpBytes);
            const int tile_start = min(first_row + tile * Shape::kRows, p.out_features - Shape::kRows);
            const int offset = Shape::index_of_sum(token, row - tile_start);
            const float scale = kScalesRows<Shape::kFormat> ? scales[row - first_row] : 1.0f;
            const float t = sum_of_parts<Shape>(parts, offset) * scale;
#pragma unroll
            for (int first = 0; first < kMasks; first += kMaskLanes) {
                const int i = first + mask_lane;
                if (kMasks % kMaskLanes != 0 && i >= kMasks) continue;
                const float gate = sum_of_parts<Shape>(parts, (1 + i) * kPlane + offset) * scale;
                const float term = activate<Shape::kActivation, true>(gate) * (t - gate);
                sum[first / kMaskLanes % kLanePartialSums] +=
                    load_mask_weight<Shape::kMaskWeightType>(p, rows.result_row(token), i) * term;
            }
        }
#pragma unroll
        for (int half = kLanePartialSums / 2; half > 0; half /= 2)
#pragma unroll
            for (int own = 0; own < half; ++own) sum[own] += sum[own + half];
#pragma unroll
        for (int distance = kMaskLanes / 2; distance > 0; distance /= 2)
            sum[0] += __shfl_xor_sync(0xffffffffu, sum[0], distance);
        if (wanted && mask_lane == 0)
            static_cast<typename Element<Shape::kType>::Bits*>(
                p.out)[static_cast<i64>(rows.result_row(token)) * p.out_features + row] =
                from_float<Shape::kType>(sum[0]);
    }
}

}  // namespace mglu
