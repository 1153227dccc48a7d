// The end of decode_mma.cu: sums over the parts of k, activation, product, route weights, sum over masks, store.
#pragma once
#include "activation.cuh"
#include "element.cuh"
#include "params.cuh"
#include "ptx.cuh"

namespace mglu {

// A block's tiles of kRows rows; the kParts warps that share a tile lie next to each other, kWarpBytes apart. Each
// left float sums [1 + kMasks][kRows][kColumns] in shared memory: t = x W^T first, then s_i = x (M_i * W)^T.
template <int kType_, int kMasks_, Activation kActivation_, int kRouteType_, int kTiles_, int kParts_, int kRows_, int kColumns_,
          int kWarpBytes_>
struct OutputShape {
    static constexpr int kType = kType_;
    static constexpr int kMasks = kMasks_;
    static constexpr Activation kActivation = kActivation_;
    static constexpr int kRouteType = kRouteType_;  // -1: no route weights
    static constexpr int kTiles = kTiles_;
    static constexpr int kParts = kParts_;
    static constexpr int kRows = kRows_;
    static constexpr int kColumns = kColumns_;
    static constexpr int kWarpBytes = kWarpBytes_;
    static constexpr int kThreads = 32 * kTiles * kParts;  // that work on it together
};

template <int kRouteType>
__device__ __forceinline__ float load_route(const Params& p, int token, int mask) {
    if constexpr (kRouteType < 0) {
        return 1.0f;
    } else {
        const auto* route = static_cast<const typename Element<kRouteType>::Bits*>(p.route);
        return to_float<kRouteType>(route[token * p.route_row_stride + mask * p.route_column_stride]);
    }
}

// The parts of k, in their order: the same bits on every run.
template <typename Shape>
__device__ __forceinline__ float add_parts(const u8* parts, int offset) {
    float sum = 0.0f;
#pragma unroll
    for (int part = 0; part < Shape::kParts; ++part)
        sum += reinterpret_cast<const float*>(parts + part * Shape::kWarpBytes)[offset];
    return sum;
}

// An output's masks are added up in kBranches sums, each of every kBranches-th mask, and those by halves: always in the same
// order. kMaskLanes neighbouring lanes share an output where threads would be idle, so that the kernel's tail is short. A
// tile that would run over the last row starts higher (see the kernels), so its rows are shifted here too.
template <typename Shape>
__device__ __forceinline__ void finish(const Params& p, const u8* shared, int first_row) {
    constexpr int kMasks = Shape::kMasks;
    constexpr int kOutputs = Shape::kTiles * Shape::kRows * Shape::kColumns;
    constexpr int kBranches = kMasks > 8 && 16 * kOutputs <= Shape::kThreads ? 16
                              : kMasks >= 8                                  ? 8
                              : kMasks >= 4                                  ? 4
                              : kMasks >= 2                                  ? 2
                                                                             : 1;
    constexpr int kIdle = Shape::kThreads / kOutputs;  // threads an output, rounded down
    constexpr int kMostLanes = kIdle >= 16 ? 16 : kIdle >= 8 ? 8 : kIdle >= 4 ? 4 : kIdle >= 2 ? 2 : 1;
    constexpr int kMaskLanes = kMostLanes < kBranches ? kMostLanes : kBranches;
    constexpr int kOwn = kBranches / kMaskLanes;  // branches of a lane
    constexpr int kPlane = Shape::kRows * Shape::kColumns;
    constexpr int kPerPass = Shape::kThreads / kMaskLanes;
    const int mask_lane = static_cast<int>(threadIdx.x) % kMaskLanes;
    for (int base = 0; base < kOutputs; base += kPerPass) {
        const int output = base + static_cast<int>(threadIdx.x) / kMaskLanes;
        const int token = output % Shape::kColumns;
        const int row = first_row + output / Shape::kColumns;
        const bool wanted = output < kOutputs && token < p.tokens && row < p.out_features;
        float sum[kOwn] = {};
        if (wanted) {
            const int tile = output / kPlane;
            const u8* parts = shared + tile * (Shape::kParts * Shape::kWarpBytes);
            const int tile_start = min(first_row + tile * Shape::kRows, p.out_features - Shape::kRows);
            const int offset = (row - tile_start) * Shape::kColumns + token;
            const float t = add_parts<Shape>(parts, offset);
#pragma unroll
            for (int first = 0; first < kMasks; first += kMaskLanes) {
                const int i = first + mask_lane;
                if (kMasks % kMaskLanes != 0 && i >= kMasks) continue;
                const float gate = add_parts<Shape>(parts, (1 + i) * kPlane + offset);
                const float term = activate<Shape::kActivation, true>(gate) * (t - gate);
                sum[first / kMaskLanes % kOwn] += load_route<Shape::kRouteType>(p, token, i) * term;
            }
        }
#pragma unroll
        for (int half = kOwn / 2; half > 0; half /= 2)
#pragma unroll
            for (int own = 0; own < half; ++own) sum[own] += sum[own + half];
#pragma unroll
        for (int distance = kMaskLanes / 2; distance > 0; distance /= 2)
            sum[0] += __shfl_xor_sync(0xffffffffu, sum[0], distance);
        if (wanted && mask_lane == 0)
            static_cast<typename Element<Shape::kType>::Bits*>(p.out)[static_cast<i64>(token) * p.out_features + row] =
                from_float<Shape::kType>(sum[0]);
    }
}

}  // namespace mglu
