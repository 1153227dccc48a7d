// The argument of the plain, decode_mma, tile_wgmma and permute_x kernels. The host packs it in this order
// (mglu_ops/backends/cuda).
//
// Where tile_wgmma reads a permuted x, a launch of permute_x precedes it on the same stream. permute_x has the same
// argument except for `out`, the 16-byte aligned memory of the copy, which tile_wgmma receives as its `x`.
#pragma once
#include "ptx.cuh"

namespace mglu {

struct Params {
    const void* x;            // [tokens, in_features]
    const void* weight;       // [out_features, in_features]
    const u8* masks;          // the packed format (packed_masks.cuh)
    const void* mask_weight;  // [tokens, n_masks], or null
    void* out;                // [tokens, out_features], contiguous
    i64 x_row_stride;         // strides count elements; an element of the masks is a byte
    i64 x_column_stride;
    i64 weight_row_stride;
    i64 weight_column_stride;
    i64 mask_row_stride;
    i64 mask_octet_stride;
    i64 mask_stride;
    i64 mask_weight_row_stride;
    i64 mask_weight_column_stride;
    int tokens;
    int out_features;
    int in_features;
    int x_is_vectorizable;  // whether x allows 16-byte loads: contiguous rows that start at multiples of 16 bytes
};

}  // namespace mglu
