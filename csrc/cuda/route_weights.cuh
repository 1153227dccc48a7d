// The weight of a mask's term in the result: route_weights[token, mask], or 1 where a call has none.
#pragma once
#include "element.cuh"
#include "params.cuh"

namespace mglu {

template <int kRouteType>  // an ElementType, or -1 for a call without route weights
__device__ __forceinline__ float load_route(const Params& p, int token, int mask) {
    if constexpr (kRouteType < 0) {
        return 1.0f;
    } else {
        const auto* route = static_cast<const typename Element<kRouteType>::Bits*>(p.route);
        return to_float<kRouteType>(route[token * p.route_row_stride + mask * p.route_column_stride]);
    }
}

}  // namespace mglu
