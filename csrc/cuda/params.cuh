// The one argument of every kernel. The host packs it in this order (mglu_ops/backends/cuda/plan.py).
//
// With a turned x, tile_wgmma comes after a launch of permute_x on the same stream with the same argument, but for `out`: memory
// for its copy of x (LaunchConfig.turned_bytes, 16-byte aligned), which is tile_wgmma's `x`.
#pragma once
#include "ptx.cuh"

namespace mglu {

struct Params {
    const void* x;        // [tokens, in_features]
    const void* weight;   // [out_features, in_features]
    const u8* masks;      // [out_features, ceil(in_features / 8), n_masks], bit k % 8 of byte k / 8
    const void* route;    // [tokens, n_masks], or null
    void* out;            // [tokens, out_features], contiguous
    i64 x_row_stride;     // strides in elements; the masks' are in bytes, which is the same
    i64 x_column_stride;
    i64 weight_row_stride;
    i64 weight_column_stride;
    i64 mask_row_stride;
    i64 mask_octet_stride;
    i64 mask_stride;
    i64 route_row_stride;
    i64 route_column_stride;
    int tokens;
    int out_features;
    int in_features;
    int x_is_vectorizable;  // 16-byte loads of x are aligned and contiguous
};

}  // namespace mglu
