// The parameters of the kernels plain, decode_mma, tile_wgmma and permute_x, and of the kernels of experts.
//
// A kernel takes one struct: first its pointers, then strides and sizes, then tensor maps, one field per line. A kernel
// of experts takes ItemParams as a second struct. Only this file declares the structs: Python reads the names, types
// and order of their fields from it (mglu_ops/backends/parameters.py), and csrc/library includes it.
//
// If tile_wgmma reads a permuted x, permute_x runs before it on the same stream. permute_x gets the parameters
// that tile_wgmma would get for this x, but its `out` is the memory of the copy, 16-byte aligned, and tile_wgmma gets
// the copy as its `x`.
#pragma once
#include "types.cuh"

namespace mglu {

struct Params {
    const void* x;             // [tokens, in_features]
    const void* weight;        // [out_features, in_features]
    const u8* packed_masks;    // the packed format (packed_masks.cuh)
    const void* mask_weights;  // [tokens, n_masks], or null
    const void* weight_scale;  // the scales of the weight's format (weight_format.cuh), or null
    void* out;                 // [tokens, out_features], contiguous
    i64 x_row_stride;          // strides count stored elements; an element of the masks is a byte
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
    int x_is_vectorizable;  // 1 if x allows 16-byte loads: contiguous rows that start at multiples of 16 bytes
};

// The second struct of a kernel of experts, whose first struct describes the layer of expert 0 (work.cuh).
struct ItemParams {
    const void* expert_ids;  // int32 or int64 [tokens][top_k]; read only if blocks find their items themselves
    const int* items;        // written by group_tokens: ItemEntry [max_items], then the rows sorted by expert, [rows]
    i64 weight_stride;       // these three strides are in bytes, from one expert to the next
    i64 mask_stride;
    i64 scale_stride;
    int id_bytes;
    int experts;
    int rows;       // rows of the result, of all experts together
    int top_k;      // row i of the result is computed from row i / top_k of x
    int is_sorted;  // 1 if the rows are sorted by expert already
    int max_items;
};

// The parameters of group_tokens.
struct GroupParams {
    const void* expert_ids;  // int32 or int64 [rows], or `offs` (the end of each expert's rows), int32 [experts]
    int* out;                // ItemEntry [max_items], and then, if ids were given, the rows sorted by expert, [rows]
    int id_bytes;
    int experts;
    int rows;
    int item_rows;
    int max_items;
};

// The parameters of experts_down. A pair is a (token, expert) pair.
struct DownParams {
    const void* y;               // [pairs, in_features], contiguous
    const void* weight;          // [experts, out_features, in_features]
    const void* weight_scale;    // the scales of the format for each expert, contiguous, or null
    const void* expert_ids;      // [pairs]
    const void* expert_weights;  // [pairs]
    void* out;              // [out_features] for one token. For more tokens, float32 [kParts, pairs, out_features],
                            // and behind it, if kParts > 1, the number of parts of each pair and row tile,
                            // u8 [pairs, tiles]
    i64 weight_stride;      // stored elements from one expert to the next
    i64 weight_row_stride;  // stored elements from one row to the next
    i64 scale_stride;       // number of scales of an expert
    int id_bytes;
    int pairs;
    int experts;
    int out_features;
    int in_features;
};

// The parameters of combine_experts.
struct CombineParams {
    const void* products;        // DownParams::out, or with `places` a matrix [rows, out_features]
    const i64* places;           // row of each pair in `products`, or null if pair i has row i
    const void* expert_ids;      // [tokens, top_k]
    const void* expert_weights;  // [tokens, top_k]
    void* out;                   // [tokens, out_features]
    int id_bytes;
    int experts;
    int out_features;
};

struct TileParams : Params {
    TensorMap x_map;       // [tokens][in_features], in boxes of min(kTokens, tokens) by 64
    TensorMap weight_map;  // [out_features][in_features], in boxes of kBlockRows / kCluster by 64
    TensorMap masks_map;   // [out_features][bytes of a row], in boxes of kBlockRows / kCluster by kMaskRowBytes
};

struct TrainingTileParams : TileParams {
    TensorMap out_map;       // [tokens][out_features], in boxes of kBoxTokens by 64
    TensorMap partials_map;  // [tokens][n_masks + 1, or 2 n_masks + 1 with mask weights][out_features], same boxes
};

struct TrainingItemParams : TrainingTileParams {
    TensorMap out_row_map;  // these two maps have boxes of one token, for an expert's last tokens
    TensorMap partials_row_map;
};

}  // namespace mglu
