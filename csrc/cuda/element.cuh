// 16- and 32-bit floating-point elements as raw bits, so that no CUDA header is needed.
#pragma once
#include "ptx.cuh"

namespace mglu {

enum ElementType : int { kFloat16 = 0, kBfloat16 = 1, kFloat32 = 2 };

template <int kType>
struct Element {
    using Bits = u16;
};
template <>
struct Element<kFloat32> {
    using Bits = u32;
};

template <int kType>
__device__ __forceinline__ float to_float(typename Element<kType>::Bits bits) {
    if constexpr (kType == kFloat32) {
        return __uint_as_float(bits);
    } else if constexpr (kType == kBfloat16) {
        return __uint_as_float(static_cast<u32>(bits) << 16);
    } else {
        float value;
        asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
        return value;
    }
}

template <int kType>
__device__ __forceinline__ typename Element<kType>::Bits from_float(float value) {
    if constexpr (kType == kFloat32) {
        return __float_as_uint(value);
    } else {
        u16 bits;
        if constexpr (kType == kBfloat16) {
            asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
        } else {
            asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
        }
        return bits;
    }
}

// Rounds two floats to 16-bit elements in one word, with `first` in the lower half.
template <int kType>
__device__ __forceinline__ u32 from_floats(float first, float second) {
    static_assert(kType == kFloat16 || kType == kBfloat16, "16-bit elements");
    u32 word;
    if constexpr (kType == kBfloat16) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
    } else {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
    }
    return word;
}

}  // namespace mglu
