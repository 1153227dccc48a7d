// Sums r_i * act(gate_i) * value_i over the masks i, where r_i is the mask weight, and in training computes the partial
// derivatives of this sum y. Included inside a file's own namespace, after Vec and Mask.
//
// The results have numbers: 0 is y, and in training 1 is dy/dt, 2 + i is dy/df_i, and with mask weights 2 + n_masks + i
// is dy/dmask_weight_i (mglu_cpu.h).
#include "vec_math.h"
#include "small_values.h"

inline std::int64_t results_of(const Forward& call) { return 1 + (call.partials ? partials_of(call) : 0); }

template <class E>
float mask_weight_at(const Forward& call, std::int64_t token, std::int64_t mask) {
    const std::int64_t at = token * call.mask_weight_stride + mask * call.mask_weight_mask_stride;
    return to_float(static_cast<const E*>(call.mask_weights)[at]);
}

inline float mask_weight(const Forward& call, std::int64_t token, std::int64_t mask) {
    if (!call.mask_weights) return 1.0f;
    switch (call.mask_weights_dtype) {
        case DType::float32: return mask_weight_at<float>(call, token, mask);
        case DType::bfloat16: return mask_weight_at<BFloat16>(call, token, mask);
        case DType::float16: return mask_weight_at<Float16>(call, token, mask);
    }
    return 0.0f;
}

// Returns the mask weights [tokens, kMaxMasks], or null if the allocation fails.
inline Floats load_mask_weights(const Forward& call) {
    Floats term_weights = allocate_floats(call.tokens * kMaxMasks);
    if (!term_weights) return term_weights;
    for (std::int64_t token = 0; token < call.tokens; ++token) {
        for (std::int64_t i = 0; i < call.n_masks; ++i)
            term_weights[token * kMaxMasks + i] = mask_weight(call, token, i);
    }
    return term_weights;
}

// The scale of a row. Its gates and values are multiplied by this scale, since they were summed from the stored
// weights.
inline float row_scale(const Forward& call, std::int64_t row) {
    return call.weight_scale && row < call.out_features ? static_cast<const float*>(call.weight_scale)[row] : 1.0f;
}

// The address of result number `result` of a token.
template <class E>
E* result_row(const Forward& call, std::int64_t result, std::int64_t token) {
    if (result == 0) return static_cast<E*>(call.out) + token * call.out_stride;
    return static_cast<E*>(call.partials) + (token * partials_of(call) + result - 1) * call.out_features;
}

// A sum and the rounding errors of its additions (Knuth's two-sum). The struct has no constructor, since GCC would
// compile one without the instruction set.
struct CompensatedSum {
    Vec sum, errors;

    MGLU_INLINE void add(Vec term) {
        const Vec next = sum + term, added = next - sum;
        errors = errors + ((sum - (next - added)) + (term - added));
        sum = next;
    }
    MGLU_INLINE Vec total() const { return sum + errors; }
};

struct GateAndValue {
    Vec gate, value;
};

// Writes result r of one vector of tokens to `to + r * stride`. `gate_and_value(i)` and `mask_weight(i)` return the
// vectors of mask i. In float32 dy/dt is a compensated sum, because the gradients add it to dy/df_i, which may nearly
// cancel it.
template <class E, class GateAndValueOf, class MaskWeightOf>
MGLU_INLINE void sum_terms(const Forward& call, Activate activate, Differentiate differentiate,
                           GateAndValueOf gate_and_value, MaskWeightOf mask_weight, float* to, std::int64_t stride) {
    Vec sum = broadcast(0.0f);
    if (!call.partials) {
        for (std::int64_t i = 0; i < call.n_masks; ++i) {
            const auto [gate, value] = gate_and_value(i);
            sum = sum + activate(gate) * mask_weight(i) * value;
        }
        store(to, sum);
        return;
    }
    CompensatedSum by_total{broadcast(0.0f), broadcast(0.0f)};
    for (std::int64_t i = 0; i < call.n_masks; ++i) {
        const auto [gate, value] = gate_and_value(i);
        const auto [activated, derivative] = differentiate(gate);
        const Vec half_weight = broadcast(0.5f) * mask_weight(i), slope = derivative * value;
        sum = sum + activated * mask_weight(i) * value;
        if constexpr (std::is_same_v<E, float>) {
            by_total.add((activated + slope) * half_weight);
        } else {
            by_total.sum = by_total.sum + (activated + slope) * half_weight;
        }
        store(to + (2 + i) * stride, (activated - slope) * half_weight);
        if (call.mask_weights) store(to + (2 + call.n_masks + i) * stride, activated * value);
    }
    store(to, sum);
    store(to + stride, by_total.total());
}
