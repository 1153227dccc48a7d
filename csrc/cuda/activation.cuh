// The activations of the gate, in float32. Names and codes are those of mglu_ops/activations.py and
// csrc/cpu/activation.h (tests/cpu/test_activation_codes.py).
//
// With kFast, exponentials and divisions use the hardware's approximations: a relative error of 1e-6 to 1e-5 at a third
// of the instructions. The kernels set it where the result is rounded to 16 bits, a rounding at least 50 times as
// large.
#pragma once

namespace mglu {

enum class Activation : int {
    silu = 0,
    gelu = 1,
    gelu_tanh = 2,
    relu = 3,
    sigmoid = 4,
    tanh = 5,
    identity = 6,
};

template <bool kFast>
__device__ __forceinline__ float sigmoid(float x) {
    // For very negative x the exponential overflows to infinity, and both divisions then return 0, the right limit.
    return kFast ? __fdividef(1.0f, 1.0f + __expf(-x)) : 1.0f / (1.0f + expf(-x));
}

template <Activation kActivation, bool kFast>
__device__ __forceinline__ float activate(float gate) {
    if constexpr (kActivation == Activation::silu) {
        return gate * sigmoid<kFast>(gate);
    } else if constexpr (kActivation == Activation::gelu) {
        return 0.5f * gate * (1.0f + erff(gate * 0.70710678118654752f));
    } else if constexpr (kActivation == Activation::gelu_tanh) {
        const float inner = 0.79788456080286536f * (gate + 0.044715f * gate * gate * gate);
        return 0.5f * gate * (1.0f + tanhf(inner));
    } else if constexpr (kActivation == Activation::relu) {
        return gate < 0.0f ? 0.0f : gate;  // a NaN stays a NaN, as in torch.relu
    } else if constexpr (kActivation == Activation::sigmoid) {
        return sigmoid<kFast>(gate);
    } else if constexpr (kActivation == Activation::tanh) {
        return tanhf(gate);
    } else {
        static_assert(kActivation == Activation::identity, "unknown activation");
        return gate;
    }
}

}  // namespace mglu
