// The choice between the two roads. Included last, inside a file's own namespace.

template <class E>
Status forward_of(const Forward& call, ParallelFor parallel_for) {
    const Floats routes = all_routes(call);
    if (!routes) return Status::out_of_memory;
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
