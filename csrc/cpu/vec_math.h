// Exponential, tanh and erf of a vector of floats, and the activations made of them. Included inside each kernel file's
// own namespace, after its Vec.
//
// The polynomials minimise the maximum relative error on their intervals (found by reweighted least squares). All
// errors are below 5e-9, a tenth of float32's rounding.

template <int N>
MGLU_INLINE Vec polynomial(Vec x, const float (&coefficients)[N]) {
    Vec result = broadcast(coefficients[N - 1]);
    for (int i = N - 2; i >= 0; --i) result = fma(result, x, broadcast(coefficients[i]));
    return result;
}

// e^x as 2^n * e^r with |r| <= ln(2) / 2. The result is infinite above 88.4. Below -87.3 it is 1e-38, more than the
// exact value; the difference changes no activation.
MGLU_INLINE Vec exponential(Vec x) {
    static constexpr float kTail[] = {5.00000010e-1f, 1.66665183e-1f, 4.16662041e-2f, 8.36895352e-3f, 1.39506022e-3f};
    x = max(broadcast(-87.3f), min(broadcast(88.8f), x));
    const Vec n = round_even(x * broadcast(1.44269504f));
    // ln(2) is subtracted in two parts. The first part has few bits, so its product with n is exact.
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
    static constexpr float kNearZero[] = {1.28379166e-1f, -3.76126271e-1f, 1.12836002e-1f, -2.68544455e-2f,
                                          5.18953685e-3f, -8.02085354e-4f, 7.88915763e-5f};
    static constexpr float kLogOfRest[] = {1.88036262e-4f, -1.12957841e0f,  -6.33219925e-1f, -1.08418545e-1f,
                                           2.52082377e-2f, -4.20455523e-3f, 4.41335114e-4f,  -2.16867491e-5f};
    const Vec size = abs(x), square = x * x, one = broadcast(1.0f);
    const Vec near_zero = fma(polynomial(square, kNearZero), x, x);
    // The second polynomial is log(1 - erf) on [1, 4.2]. Beyond that interval erf is 1 in float32.
    const Vec far = one - exponential(polynomial(min(broadcast(4.2f), size), kLogOfRest));
    return if_less(size, one, near_zero, copy_sign(far, x));
}

MGLU_INLINE Vec logistic(Vec x) { return broadcast(1.0f) / (broadcast(1.0f) + exponential(broadcast(0.0f) - x)); }

// Computes (1 + tanh(u)) / 2 + x (1 - tanh(u)^2) / 2 * du/dx with u = sqrt(2 / pi) (x + 0.044715 x^3).
MGLU_INLINE Vec gelu_tanh_derivative(Vec x) {
    const Vec one = broadcast(1.0f), half = broadcast(0.5f);
    const Vec t = hyperbolic_tangent(fma(broadcast(0.044715f) * x * x, x, x) * broadcast(0.797884561f));
    const Vec slope = fma(broadcast(0.107032224f) * x, x, broadcast(0.797884561f));
    return fma(half * x * (one - t * t), slope, half * (one + t));
}

using Activate = Vec (*)(Vec);

struct ValueAndDerivative {
    Vec value, derivative;
};
using Differentiate = ValueAndDerivative (*)(Vec);

#define MGLU_ACTIVATION(name, code, formula, slope)           \
    inline Vec name(Vec x) { return formula; }                \
    inline ValueAndDerivative name##_with_derivative(Vec x) { \
        [[maybe_unused]] const Vec value = formula;           \
        return {value, slope};                                \
    }
#include "activation.h"

inline Activate activation_of(Activation activation) {
    switch (activation) {
#define MGLU_ACTIVATION(name, ...) \
    case Activation::name: return name;
#include "activation.h"
    }
    return nullptr;
}

inline Differentiate derivative_of(Activation activation) {
    switch (activation) {
#define MGLU_ACTIVATION(name, ...) \
    case Activation::name: return name##_with_derivative;
#include "activation.h"
    }
    return nullptr;
}
