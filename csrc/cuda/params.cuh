// The parameters of the kernels plain, decode_mma, tile_wgmma and permute_x, and of the kernels of experts.
//
// A kernel takes one struct: first its pointers, then strides and sizes, then tensor maps, one field a line. A kernel of
// experts takes ItemParams as a second one. The structs are declared in CUDA alone. Python reads the names, types and
// order of their fields from the source (mglu_ops/backends/parameters.py), and csrc/library includes this header.
//
// Where tile_wgmma reads a permuted x, a launch of permute_x precedes it on the same stream. permute_x has the same
// parameters except for `out`, the 16-byte aligned memory of the copy, which tile_wgmma receives as its `x`.
#pragma once
#include "types.cuh"

namespace mglu {

struct Params {
    const void* x;             // [tokens, in_features]
    const void* weight;        // [out_features, in_features]
    const u8* packed_masks;    // the packed format (packed_masks.cuh)
    const void* mask_weights;  // [tokens, n_masks], or null
    const void* weight_scale;  // as the weight's format has it (weight_format.cuh), or null
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
    int x_is_vectorizable;  // whether x allows 16-byte loads: contiguous rows that start at multiples of 16 bytes
};

// What a kernel of experts takes beside the layer parameters of expert 0 (work.cuh).
struct ItemParams {
    const void* expert_ids;  // int32 or int64 [tokens][top_k]; read only where blocks find their items themselves
    const int* items;        // what group_tokens wrote: [max_items][4], then the places' rows, [rows]
    i64 weight_stride;       // bytes from one expert to the next
    i64 mask_stride;
    i64 scale_stride;
    int id_bytes;
    int experts;
    int rows;       // of the result, of all experts together
    int top_k;      // x has a row for every top_k rows of the result
    int is_sorted;  // place i is row i: the rows are sorted by expert already
    int max_items;
};

// Of group_tokens.
struct GroupParams {
    const void* expert_ids;  // int32 or int64 [rows], or offs, int32 [experts]
    int* out;                // ItemEntry [max_items], then for ids the rows in the order of places, [rows]
    int id_bytes;
    int experts;
    int rows;
    int item_rows;
    int max_items;
};

// Of experts_down.
struct DownParams {
    const void* y;               // [pairs, in_features], contiguous
    const void* weight;          // [experts, out_features, in_features]
    const void* weight_scale;    // as the format has it, for each expert; contiguous, or null
    const void* expert_ids;      // [pairs]
    const void* expert_weights;  // [pairs]
    void* out;                   // [out_features] for one token, else float32 [kParts, pairs, out_features], and then
                                 // with kParts > 1 the parts of each pair and tile of rows, u8 [pairs, tiles]
    i64 weight_stride;           // stored elements from one expert to the next
    i64 weight_row_stride;       // and from one row to the next
    i64 scale_stride;            // scales of an expert
    int id_bytes;
    int pairs;
    int experts;
    int out_features;
    int in_features;
};

// Of combine_experts.
struct CombineParams {
    const void* products;        // as DownParams::out, or with `places` [rows, out_features] in another order
    const i64* places;           // the row of each pair in products, or null: its own
    const void* expert_ids;      // [tokens, top_k]
    const void* expert_weights;  // [tokens, top_k]
    void* out;                   // [tokens, out_features]
    int id_bytes;
    int experts;
    int out_features;
};

struct TileParams : Params {
    TensorMap x_map;       // [tokens][in_features], in boxes of kTokens (at most all tokens) by 64
    TensorMap weight_map;  // [out_features][in_features], in boxes of kBlockRows / kCluster by 64
    TensorMap masks_map;   // [out_features][bytes of a row], in boxes of kBlockRows / kCluster by kMaskRowBytes
};

struct TrainingTileParams : TileParams {
    TensorMap out_map;       // [tokens][out_features], in boxes of kBoxTokens by 64
    TensorMap partials_map;  // [tokens][n_masks + 1, or 2 n_masks + 1 with mask weights][out_features], as out_map
};

struct TrainingItemParams : TrainingTileParams {
    TensorMap out_row_map;  // the same matrices in boxes of one token, for an expert's last tokens
    TensorMap partials_row_map;
};

}  // namespace mglu
