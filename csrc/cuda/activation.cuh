// The activations of the gate, in float32. Names and codes agree with mglu_ops/activations.py and csrc/cpu/activation.h
// (tests/operators/test_parameters.py).
//
// With kFast, exponentials and divisions are the hardware's approximations, which have a relative error of 1e-6 to 1e-5
// and take a third of the instructions. Kernels set kFast if they round the result to 16 bits, since the rounding error
// is at least 50 times as large.
#pragma once
#include "ptx.cuh"

namespace mglu {

enum class Activation : int {
    silu = 0,
    gelu = 1,
    gelu_tanh = 2,
    relu = 3,
    sigmoid = 4,
    tanh = 5,
    identity = 6,
    relu_squared = 7,
};

template <bool kFast>
__device__ __forceinline__ float exponential(float x) {
    return kFast ? exp2_approximate(x * 1.44269504088896341f) : expf(x);
}

template <bool kFast>
__device__ __forceinline__ float reciprocal(float x) {
    return kFast ? reciprocal_approximate(x) : 1.0f / x;
}

template <bool kFast>
__device__ __forceinline__ float sigmoid(float x) {
    // For very negative x the exponential overflows to infinity, whose reciprocal is 0, the correct limit.
    return reciprocal<kFast>(1.0f + exponential<kFast>(-x));
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
    } else if constexpr (kActivation == Activation::relu_squared) {
        const float positive = gate < 0.0f ? 0.0f : gate;
        return positive * positive;
    } else {
        static_assert(kActivation == Activation::identity, "unknown activation");
        return gate;
    }
}

// The normal distribution function of x and its density, which share an exponential. With kFast the distribution
// function is formula 7.1.26 of Abramowitz and Stegun. Its absolute error is 1e-7, as large as the error of 1 + erff(x)
// in the lower tail.
template <bool kFast>
__device__ __forceinline__ void normal_distribution(float x, float& probability, float& density) {
    const float e = exponential<kFast>(x * x * -0.5f);
    density = 0.39894228040143268f * e;
    if constexpr (kFast) {
        const float s = reciprocal<kFast>(fmaf(0.231641888f, fabsf(x), 1.0f));
        float tail = fmaf(0.530702714f, s, -0.726576014f);
        tail = fmaf(tail, s, 0.710706871f);
        tail = fmaf(tail, s, -0.142248368f);
        tail = fmaf(tail, s, 0.127414796f) * s * e;
        probability = x < 0.0f ? tail : 1.0f - tail;
    } else {
        probability = 0.5f * (1.0f + erff(x * 0.70710678118654752f));
    }
}

struct ValueAndDerivative {
    float value, derivative;
};

// Computes activate() and its derivative. Where an activation has no derivative, it returns the number that
// torch uses instead (mglu_ops/activations.py); for relu, this is 0 at 0 and 1 at NaN.
template <Activation kActivation, bool kFast>
__device__ __forceinline__ ValueAndDerivative activate_with_derivative(float gate) {
    if constexpr (kActivation == Activation::silu) {
        const float s = sigmoid<kFast>(gate);
        const float value = gate * s;
        return {value, fmaf(value, 1.0f - s, s)};
    } else if constexpr (kActivation == Activation::gelu) {
        float probability, density;
        normal_distribution<kFast>(gate, probability, density);
        return {gate * probability, fmaf(gate, density, probability)};
    } else if constexpr (kActivation == Activation::gelu_tanh) {
        // s is (1 + tanh(u)) / 2 = sigmoid(2 u), with u = sqrt(2 / pi) (gate + 0.044715 gate^3).
        const float square = gate * gate;
        const float s = sigmoid<kFast>(gate * fmaf(0.071354816f, square, 1.59576912f));
        const float value = gate * s;
        return {value, fmaf(value * (1.0f - s), fmaf(0.214064449f, square, 1.59576912f), s)};
    } else if constexpr (kActivation == Activation::relu) {
        return {gate < 0.0f ? 0.0f : gate, gate <= 0.0f ? 0.0f : 1.0f};
    } else if constexpr (kActivation == Activation::sigmoid) {
        const float s = sigmoid<kFast>(gate);
        return {s, fmaf(-s, s, s)};
    } else if constexpr (kActivation == Activation::tanh) {
        const float value = tanhf(gate);
        return {value, fmaf(-value, value, 1.0f)};
    } else if constexpr (kActivation == Activation::relu_squared) {
        const float positive = gate < 0.0f ? 0.0f : gate;
        return {positive * positive, 2.0f * positive};
    } else {
        static_assert(kActivation == Activation::identity, "unknown activation");
        return {gate, 1.0f};
    }
}

}  // namespace mglu
