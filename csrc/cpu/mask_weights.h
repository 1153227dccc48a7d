// Mask weights as float32. Included inside a file's own namespace, after element.h.

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

// Returns [tokens, kMaxMasks], or null if the allocation fails.
inline Floats load_mask_weights(const Forward& call) {
    Floats term_weights = allocate_floats(call.tokens * kMaxMasks);
    if (!term_weights) return term_weights;
    for (std::int64_t token = 0; token < call.tokens; ++token) {
        for (std::int64_t i = 0; i < call.n_masks; ++i)
            term_weights[token * kMaxMasks + i] = mask_weight(call, token, i);
    }
    return term_weights;
}
