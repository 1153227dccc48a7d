// The gating functions on a vector of floats. Included inside a file's own namespace, below its Vec.
//
// The coefficients are least maximum relative errors on their intervals, found by reweighted least squares; all lie
// below 5e-9, a tenth of float32's rounding.

template <int N>
MGLU_INLINE Vec polynomial(Vec x, const float (&coefficients)[N]) {
    Vec result = broadcast(coefficients[N - 1]);
    for (int i = N - 2; i >= 0; --i) result = fma(result, x, broadcast(coefficients[i]));
    return result;
}

// 2^n * e^r with |r| <= ln(2) / 2. Infinite above 88.4, 1e-38 below -87.3, which no caller can tell from exact values.
MGLU_INLINE Vec exponential(Vec x) {
    static constexpr float kTail[] = {5.00000010e-1f, 1.66665183e-1f, 4.16662041e-2f, 8.36895352e-3f, 1.39506022e-3f};
    x = max(broadcast(-87.3f), min(broadcast(88.8f), x));
    const Vec n = round_even(x * broadcast(1.44269504f));
    // ln(2) in two parts, the first of so few bits that n times it is exact.
    Vec r = fma(n, broadcast(-0.693359375f), x);
    r = fma(n, broadcast(2.12194440e-4f), r);
    const Vec e = fma(polynomial(r, kTail), r * r, r) + broadcast(1.0f);
    return scale_by_power(e, n);
}

MGLU_INLINE Vec hyperbolic_tangent(Vec x) {
    static constexpr float kNearZero[] = {-3.33332802e-1f, 1.33313837e-1f, -5.37340031e-2f, 2.06181317e-2f,
                                          -5.67931375e-3f};
    const Vec size = abs(x), square = x * x, one = broadcast(1.0f);
    const Vec near_zero = fma(polynomial(square, kNearZero), square * x, x);
    const Vec far = one - broadcast(2.0f) / (exponential(size + size) + one);
    return if_less(size, broadcast(0.625f), near_zero, copy_sign(far, x));
}

MGLU_INLINE Vec error_function(Vec x) {
    static constexpr float kNearZero[] = {1.28379166e-1f,  -3.76126271e-1f, 1.12836002e-1f, -2.68544455e-2f,
                                          5.18953685e-3f,  -8.02085354e-4f, 7.88915763e-5f};
    static constexpr float kLogOfRest[] = {1.88036262e-4f,  -1.12957841e0f, -6.33219925e-1f, -1.08418545e-1f,
                                           2.52082377e-2f, -4.20455523e-3f, 4.41335114e-4f,  -2.16867491e-5f};
    const Vec size = abs(x), square = x * x, one = broadcast(1.0f);
    const Vec near_zero = fma(polynomial(square, kNearZero), x, x);
    // log(1 - erf) on [1, 4.2]; past that, erf is 1 in float32.
    const Vec far = one - exponential(polynomial(min(broadcast(4.2f), size), kLogOfRest));
    return if_less(size, one, near_zero, copy_sign(far, x));
}

MGLU_INLINE Vec logistic(Vec x) { return broadcast(1.0f) / (broadcast(1.0f) + exponential(broadcast(0.0f) - x)); }

using Activate = Vec (*)(Vec);

inline Vec silu(Vec x) { return x / (broadcast(1.0f) + exponential(broadcast(0.0f) - x)); }
inline Vec gelu(Vec x) {
    return broadcast(0.5f) * x * (broadcast(1.0f) + error_function(x * broadcast(0.707106781f)));
}
inline Vec gelu_tanh(Vec x) {
    const Vec inner = fma(broadcast(0.044715f) * x * x, x, x) * broadcast(0.797884561f);
    return broadcast(0.5f) * x * (broadcast(1.0f) + hyperbolic_tangent(inner));
}
inline Vec relu(Vec x) { return max(broadcast(0.0f), x); }
inline Vec sigmoid(Vec x) { return logistic(x); }
inline Vec tanh(Vec x) { return hyperbolic_tangent(x); }
inline Vec identity(Vec x) { return x; }

inline Activate activation_of(Activation name) {
    switch (name) {
        case Activation::silu: return silu;
        case Activation::gelu: return gelu;
        case Activation::gelu_tanh: return gelu_tanh;
        case Activation::relu: return relu;
        case Activation::sigmoid: return sigmoid;
        case Activation::tanh: return tanh;
        case Activation::identity: return identity;
    }
    return nullptr;
}
