// The weight of a mask's term in the result: mask_weights[token, mask], or 1 in a call without mask weights.
#pragma once
#include "element.cuh"
#include "params.cuh"

namespace mglu {

template <int kMaskWeightType>  // an ElementType, or -1 for a call without mask weights
__device__ __forceinline__ float load_mask_weight(const Params& p, int token, int mask) {
    if constexpr (kMaskWeightType < 0) {
        return 1.0f;
    } else {
        const auto* mask_weight = static_cast<const typename Element<kMaskWeightType>::Bits*>(p.mask_weights);
        return to_float<kMaskWeightType>(
            mask_weight[token * p.mask_weight_row_stride + mask * p.mask_weight_column_stride]);
    }
}

}  // namespace mglu
