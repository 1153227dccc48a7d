// The choice between the two roads, and the routes both read. Included last, inside a file's own namespace.

template <class E>
float route_at(const Forward& call, std::int64_t token, std::int64_t mask) {
    const std::int64_t at = token * call.route_stride + mask * call.route_mask_stride;
    return to_float(static_cast<const E*>(call.route_weights)[at]);
}

inline float route_of(const Forward& call, std::int64_t token, std::int64_t mask) {
    if (!call.route_weights) return 1.0f;
    switch (call.route_dtype) {
        case DType::float32: return route_at<float>(call, token, mask);
        case DType::bfloat16: return route_at<BFloat16>(call, token, mask);
        case DType::float16: return route_at<Float16>(call, token, mask);
    }
    return 0.0f;
}

template <class E>
Status forward_of(const Forward& call, ParallelFor parallel_for) {
    const Floats routes = allocate_floats(call.tokens * kMaxMasks);
    if (!routes) return Status::out_of_memory;
    for (std::int64_t token = 0; token < call.tokens; ++token) {
        for (std::int64_t i = 0; i < call.n_masks; ++i) routes[token * kMaxMasks + i] = route_of(call, token, i);
    }
    const bool few = call.tokens <= kFewTokens || call.in_features == 0;
    return few ? forward_few<E>(call, parallel_for, routes.get()) : forward_many<E>(call, parallel_for, routes.get());
}

inline Status forward_here(const Forward& call, ParallelFor parallel_for) {
    switch (call.dtype) {
        case DType::float32: return forward_of<float>(call, parallel_for);
        case DType::bfloat16: return forward_of<BFloat16>(call, parallel_for);
        case DType::float16: return forward_of<Float16>(call, parallel_for);
    }
    return Status::invalid_argument;
}
