// Chooses between few_tokens.h, many_tokens.h and linear.h. Included last, inside a file's own namespace, after
// row_sums.h or row_sums_avx512.h.
#include "terms.h"
#include "few_tokens.h"
#include "many_tokens.h"
#include "linear.h"

template <class E>
Status forward_typed(const Forward& call, ParallelFor parallel_for) {
    if (call.n_masks == 0) return linear<E>(call, parallel_for);
    const Floats term_weights = load_mask_weights(call);
    if (!term_weights) return Status::out_of_memory;
    const bool is_dense = call.weight_format == WeightFormat::dense;
    const bool few = (call.tokens <= kMaxFewTokens && !call.partials) || call.in_features == 0 || !is_dense;
    return few ? forward_few<E>(call, parallel_for, term_weights.get())
               : forward_many<E>(call, parallel_for, term_weights.get());
}

inline Status forward_any_dtype(const Forward& call, ParallelFor parallel_for) {
    switch (call.dtype) {
        case DType::float32: return forward_typed<float>(call, parallel_for);
        case DType::bfloat16: return forward_typed<BFloat16>(call, parallel_for);
        case DType::float16: return forward_typed<Float16>(call, parallel_for);
    }
    return Status::invalid_argument;
}
