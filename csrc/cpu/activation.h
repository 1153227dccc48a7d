// The activations of the gate, as an X-macro: one MGLU_ACTIVATION(name, code, formula, derivative) for each.
//
// The includer defines MGLU_ACTIVATION; the end of this file undefines it. The formula and the derivative take a vector
// `x`; the derivative may also use `value`, the formula's result. Where a function has no derivative, its
// entry gives the number that torch uses instead; for relu, this is 0 at 0 and 1 at NaN. Names and codes agree with
// mglu_ops/activations.py and csrc/cuda/activation.cuh (tests/operators/test_parameters.py); codes count from 0 without
// gaps.

MGLU_ACTIVATION(silu, 0, x / (broadcast(1.0f) + exponential(broadcast(0.0f) - x)),
                logistic(x) * (broadcast(1.0f) + x * (broadcast(1.0f) - logistic(x))))
MGLU_ACTIVATION(gelu, 1, broadcast(0.5f) * x * (broadcast(1.0f) + error_function(x * broadcast(0.707106781f))),
                fma(x * broadcast(0.398942280f), exponential(x * x * broadcast(-0.5f)),
                    broadcast(0.5f) * (broadcast(1.0f) + error_function(x * broadcast(0.707106781f)))))
MGLU_ACTIVATION(gelu_tanh, 2,
                broadcast(0.5f) * x *
                    (broadcast(1.0f) +
                     hyperbolic_tangent(fma(broadcast(0.044715f) * x * x, x, x) * broadcast(0.797884561f))),
                gelu_tanh_derivative(x))
MGLU_ACTIVATION(relu, 3, max(broadcast(0.0f), x),
                if_less(x, broadcast(0x1p-149f), broadcast(0.0f), broadcast(1.0f)))
MGLU_ACTIVATION(sigmoid, 4, logistic(x), value * (broadcast(1.0f) - value))
MGLU_ACTIVATION(tanh, 5, hyperbolic_tangent(x), broadcast(1.0f) - value * value)
MGLU_ACTIVATION(identity, 6, x, broadcast(1.0f))
MGLU_ACTIVATION(relu_squared, 7, max(broadcast(0.0f), x) * max(broadcast(0.0f), x),
                broadcast(2.0f) * max(broadcast(0.0f), x))

#undef MGLU_ACTIVATION
