// Route weights as float32. Included inside a file's own namespace, after element.h.

template <class E>
float route_at(const Forward& call, std::int64_t token, std::int64_t mask) {
    const std::int64_t at = token * call.route_stride + mask * call.route_mask_stride;
    return to_float(static_cast<const E*>(call.route_weights)[at]);
}

inline float route_weight(const Forward& call, std::int64_t token, std::int64_t mask) {
    if (!call.route_weights) return 1.0f;
    switch (call.route_dtype) {
        case DType::float32: return route_at<float>(call, token, mask);
        case DType::bfloat16: return route_at<BFloat16>(call, token, mask);
        case DType::float16: return route_at<Float16>(call, token, mask);
    }
    return 0.0f;
}

// Returns [tokens, kMaxMasks], or null if the allocation fails.
inline Floats load_route_weights(const Forward& call) {
    Floats routes = allocate_floats(call.tokens * kMaxMasks);
    if (!routes) return routes;
    for (std::int64_t token = 0; token < call.tokens; ++token) {
        for (std::int64_t i = 0; i < call.n_masks; ++i) routes[token * kMaxMasks + i] = route_weight(call, token, i);
    }
    return routes;
}
