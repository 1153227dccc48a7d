// How the formats of W are decoded, once for all masks, where W leaves memory.
#pragma once
#include "element.cuh"
#include "params.cuh"
#include "weight_formats.cuh"

namespace mglu {

// The weights of one format, for x of type kType.
template <WeightFormat kFormat, int kType>
struct StoredWeight;

template <int kType>
struct StoredWeight<WeightFormat::dense, kType> {
    using Bits = typename Element<kType>::Bits;

    static __device__ __forceinline__ float decode(Bits bits) { return to_float<kType>(bits); }

    // A factor of all weights of a row, which multiplies the row's sums.
    static __device__ __forceinline__ float row_scale(const Params&, i64) { return 1.0f; }
};

}  // namespace mglu
