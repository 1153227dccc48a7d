// The activations of the gate, in float32.
//
// Where the result is rounded to 16 bits anyway (kFast), exponential and division use the hardware's approximations:
// relative errors of 1e-6 to 1e-5, a fiftieth of the rounding, at a third of the instructions.
#pragma once

namespace mglu {

enum Activation : int { kSilu = 0, kGelu = 1, kGeluTanh = 2, kRelu = 3, kSigmoid = 4, kTanh = 5, kIdentity = 6 };

template <bool kFast>
__device__ __forceinline__ float sigmoid(float x) {
    // exp overflows to infinity for very negative x, and both divisions then give 0, which is right.
    return kFast ? __fdividef(1.0f, 1.0f + __expf(-x)) : 1.0f / (1.0f + expf(-x));
}

template <int kActivation, bool kFast>
__device__ __forceinline__ float activate(float gate) {
    if constexpr (kActivation == kSilu) {
        return gate * sigmoid<kFast>(gate);
    } else if constexpr (kActivation == kGelu) {
        return 0.5f * gate * (1.0f + erff(gate * 0.70710678118654752f));
    } else if constexpr (kActivation == kGeluTanh) {
        const float inner = 0.79788456080286536f * (gate + 0.044715f * gate * gate * gate);
        return 0.5f * gate * (1.0f + tanhf(inner));
    } else if constexpr (kActivation == kRelu) {
        return gate < 0.0f ? 0.0f : gate;  // NaN stays NaN, as in torch.relu
    } else if constexpr (kActivation == kSigmoid) {
        return sigmoid<kFast>(gate);
    } else if constexpr (kActivation == kTanh) {
        return tanhf(gate);
    } else {
        static_assert(kActivation == kIdentity, "unknown activation");
        return gate;
    }
}

}  // namespace mglu
