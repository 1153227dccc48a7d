// How the formats of W are decoded, once for all masks, where W leaves memory.
#pragma once
#include "element.cuh"
#include "params.cuh"
#include "weight_formats.cuh"

namespace mglu {

// The weights of one format, for x of type kType. `decode` gives the number that is stored for one of the kColumns
// neighbouring columns of an element. A weight is that number times `scale`, which is the same for aligned groups of
// kScaledTogether columns.
template <WeightFormat kFormat, int kType>
struct StoredWeight;

struct WithoutScales {
    static constexpr int kColumns = 1;

    static __device__ __forceinline__ float scale(const Params&, i64, int) { return 1.0f; }
};

struct WithRowScales {
    static constexpr int kColumns = 1;

    static __device__ __forceinline__ float scale(const Params& p, i64 row, int) {
        return static_cast<const float*>(p.weight_scale)[row];
    }
};

struct Fp8 {
    using Bits = u8;

    // The product rebases the exponent, and turns subnormal numbers into normal ones.
    static __device__ __forceinline__ float decode(Bits bits, int) {
        const u32 sign = static_cast<u32>(bits & 0x80) << 24, magnitude = bits & 0x7f;
        if (magnitude == 0x7f) return __uint_as_float(0x7fc00000u);
        return __uint_as_float(sign | magnitude << 20) * 0x1p120f;
    }
};

template <int kType>
struct StoredWeight<WeightFormat::dense, kType> : WithoutScales {
    using Bits = typename Element<kType>::Bits;

    static __device__ __forceinline__ float decode(Bits bits, int) { return to_float<kType>(bits); }
};

template <int kType>
struct StoredWeight<WeightFormat::fp8_row, kType> : Fp8, WithRowScales {};

template <int kType>
struct StoredWeight<WeightFormat::fp8_block, kType> : Fp8 {
    static constexpr int kColumns = 1;

    static __device__ __forceinline__ float scale(const Params& p, i64 row, int k) {
        const i64 groups = (p.in_features + kScaledTogether - 1) / kScaledTogether;
        return static_cast<const float*>(p.weight_scale)[row / kScaledTogether * groups + k / kScaledTogether];
    }
};

template <int kType>
struct StoredWeight<WeightFormat::int8_row, kType> : WithRowScales {
    using Bits = u8;

    static __device__ __forceinline__ float decode(Bits bits, int) { return static_cast<signed char>(bits); }
};

template <int kType>
struct StoredWeight<WeightFormat::int4_group, kType> {
    using Bits = u8;
    static constexpr int kColumns = 2;

    static __device__ __forceinline__ float decode(Bits bits, int column) {
        return static_cast<int>(bits >> 4 * column & 15) - 8;
    }
    static __device__ __forceinline__ float scale(const Params& p, i64 row, int k) {
        const i64 groups = (p.in_features + kScaledTogether - 1) / kScaledTogether;
        return to_float<kBfloat16>(static_cast<const u16*>(p.weight_scale)[row * groups + k / kScaledTogether]);
    }
};

}  // namespace mglu
