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

template <int kType>
struct StoredWeight<WeightFormat::fp8_row, kType> {
    using Bits = u8;

    // The product rebases the exponent, and turns subnormal numbers into normal ones.
    static __device__ __forceinline__ float decode(Bits bits) {
        const u32 sign = static_cast<u32>(bits & 0x80) << 24, magnitude = bits & 0x7f;
        if (magnitude == 0x7f) return __uint_as_float(0x7fc00000u);
        return __uint_as_float(sign | magnitude << 20) * 0x1p120f;
    }

    static __device__ __forceinline__ float row_scale(const Params& p, i64 row) {
        return static_cast<const float*>(p.weight_scale)[row];
    }
};

}  // namespace mglu
