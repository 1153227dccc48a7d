// Assigns rows of W, tokens and experts to the blocks of each kernel of the forward pass. No other file depends on how
// blocks are numbered.
#pragma once
#include "items.cuh"
#include "params.cuh"
#include "ptx.cuh"

namespace mglu {

// The first row and the first token of a block.
template <class Row>
struct Work {
    Row row;
    int token;
};

// The work of a block in a grid of rows by tokens (plain).
template <int kRows, int kTokens>
__device__ __forceinline__ Work<i64> work_in_grid() {
    return {static_cast<i64>(blockIdx.x) * kRows, static_cast<int>(blockIdx.y) * kTokens};
}

// The work of a block in a grid where blocks with the same rows and different tokens are neighbours, so that only the
// first of these blocks reads W from memory (decode_mma).
template <int kRows, int kTokens>
__device__ __forceinline__ Work<int> work_of_neighbours(const Params& p) {
    const int groups = (p.tokens + kTokens - 1) / kTokens;
    return {static_cast<int>(blockIdx.x / groups) * kRows, static_cast<int>(blockIdx.x % groups) * kTokens};
}

// Maps a block's tokens to rows of x and of the result, in a layer without experts.
struct RowsInOrder {
    static constexpr bool kConsecutive = true;
    __device__ __forceinline__ int x_row(int token) const { return token; }
    __device__ __forceinline__ int result_row(int token) const { return token; }
};

// --- Experts: a block computes an item, up to kTokens rows of one expert's layer -------------------------------------
//
// The rows of the result are numbered token * top_k + k. An item is a range of these rows in the order sorted by
// expert. group_tokens.cu sorts the rows and writes a table of items. With few rows, blocks find their items
// themselves.

enum class Items : int {
    none = 0,   // a layer without experts
    table = 1,  // read from group_tokens' table
    found = 2,  // found by each block: every kTokens-th row of an expert begins an item
};

#ifndef MGLU_ITEMS
#define MGLU_ITEMS 0
#endif
constexpr Items kItems = static_cast<Items>(MGLU_ITEMS);
#if MGLU_ITEMS
#define MGLU_ITEM_PARAMS , const __grid_constant__ mglu::ItemParams items
#else
#define MGLU_ITEM_PARAMS
#endif

struct Item {
    int expert;     // as in ItemEntry
    int count;      // number of rows; 0 if the block has nothing to do
    int row_block;  // index of this block among the `row_blocks` blocks of the item
};

// Reads a block's item from the table. Blocks with the same rows of W and different items of one expert are neighbours,
// so that only the first of these blocks reads W from memory. Entries without rows come last.
__device__ __forceinline__ Item item_of_table(const ItemParams& p, int block, int row_blocks, int* rows) {
    const ItemEntry* entries = reinterpret_cast<const ItemEntry*>(p.items);
    int index = block / row_blocks;
    ItemEntry entry = entries[index];
    if (entry.count == 0) return {-1, 0, 0};
    const int count = entry.neighbours & 0xffff, first = index - static_cast<int>(entry.neighbours >> 16);
    const int block_of_expert = block - first * row_blocks;
    if (count > 1) {
        index = first + block_of_expert % count;
        entry = entries[index];
    }
    const int position = entry.first + static_cast<int>(threadIdx.x);
    if (threadIdx.x < entry.count) rows[threadIdx.x] = p.is_sorted ? position : p.items[4 * p.max_items + position];
    return {entry.expert, entry.count, block_of_expert / count};
}

// Finds the item that begins with row `block % p.rows`, without a table. Every warp searches all rows for rows of that
// row's expert; each of its lanes looks at every 32nd row. The item is empty unless the number of earlier rows of the
// expert is a multiple of kTokens.
template <int kTokens>
__device__ __forceinline__ Item find_item(const ItemParams& p, int block, int* rows) {
    const int lane = threadIdx.x % 32, leader = block % p.rows;
    const int expert = expert_of(p.expert_ids, p.id_bytes, leader, p.experts);
    int found = 0, earlier = 0;
#pragma unroll 2
    for (int first = 0; first < p.rows; first += 32) {
        const int row = first + lane;
        const bool same = row < p.rows && expert_of(p.expert_ids, p.id_bytes, row, p.experts) == expert;
        const u32 lanes = __ballot_sync(~0u, same);
        if (leader >= first && leader < first + 32) earlier = found + __popc(lanes & ((1u << leader % 32) - 1));
        const int position = found + __popc(lanes & ((1u << lane) - 1)) - earlier;
        if (threadIdx.x < 32 && same && row >= leader && position < kTokens) rows[position] = row;
        found += __popc(lanes);
    }
    const int count = earlier % kTokens == 0 ? min(found - earlier, kTokens) : 0;
    return {expert < p.experts ? expert : -1, count, block / p.rows};
}

// The row of x at a position of the order sorted by expert. group_tokens must have ended.
__device__ __forceinline__ int x_row_at(const ItemParams& p, int position) {
    return p.is_sorted ? position : p.items[4 * p.max_items + position] / p.top_k;
}

// The item of this block. An item has `row_blocks` blocks, a multiple of kCluster, and the blocks of a cluster have the
// same item. All threads of the block call this after they have waited for earlier kernels. After the block's next
// barrier, `rows` holds the numbers of the rows of the result that the item computes.
template <int kTokens, int kCluster>
__device__ __forceinline__ Item item_of_block(const ItemParams& p, int row_blocks, int* rows) {
    const int block = blockIdx.x / kCluster;
    Item item = kItems == Items::found ? find_item<kTokens>(p, block, rows)
                                       : item_of_table(p, block, row_blocks / kCluster, rows);
    if constexpr (kCluster > 1) item.row_block = item.row_block * kCluster + rank_in_cluster();
    return item;
}

// Narrows the parameters to the layer of an item's expert.
__device__ __forceinline__ Params narrow_to_item(Params p, const ItemParams& items, const Item& item) {
    p.weight = static_cast<const u8*>(p.weight) + item.expert * items.weight_stride;
    p.packed_masks += item.expert * items.mask_stride;
    p.weight_scale = static_cast<const u8*>(p.weight_scale) + item.expert * items.scale_stride;
    p.tokens = item.count;
    return p;
}

// Maps an item's tokens to rows of x and of the result. `rows` is in shared memory.
struct RowsOfItem {
    static constexpr bool kConsecutive = false;
    const int* rows;
    int top_k;

    __device__ __forceinline__ int x_row(int token) const { return rows[token] / top_k; }
    __device__ __forceinline__ int result_row(int token) const { return rows[token]; }
};

// Writes zeros to an item whose rows have no expert. A block writes up to kRows columns of the result, from column
// `first` on.
template <int kRows, typename Bits>
__device__ __forceinline__ void store_zeros(const Params& p, const RowsOfItem& rows, int count, i64 first) {
    for (int i = threadIdx.x; i < count * kRows; i += blockDim.x)
        if (first + i % kRows < p.out_features)
            static_cast<Bits*>(
                p.out)[static_cast<i64>(rows.result_row(i / kRows)) * p.out_features + first + i % kRows] = 0;
}

// --- The tiles of tile_wgmma -----------------------------------------------------------------------------------------

struct Tile {
    int row;    // first row of W; less than `owned` if the tile would run past the end
    int owned;  // first row that the tile writes
    int token;

    // The tile's first row in the weights and masks, and in the scales.
    __device__ __forceinline__ int stored_row(const Params&) const { return row; }
    __device__ __forceinline__ int scaled_row(const Params&) const { return row; }
    __device__ __forceinline__ int first_token() const { return token; }
    // end() is the end of the tokens that the tile may write. The other two functions return a token's row of the
    // result and its row of the mask weights.
    __device__ __forceinline__ int end(const Params& p) const { return p.tokens; }
    __device__ __forceinline__ int result_row(int token) const { return token; }
    __device__ __forceinline__ int row_of_weights(int token) const { return token; }
};

// The order of the tiles of tile_wgmma, over which its blocks loop. A swath is kSwath row tiles. Tiles are ordered by
// swaths, and by tokens within a swath, so that blocks that run at the same time share W and x in L2. The blocks of a
// cluster have the same rows and consecutive tokens; the last block may have no token to write.
template <int kRows, int kTokens, int kCluster, int kSwath>
struct TileOrder {
    static __device__ __forceinline__ int row_tiles(const Params& p) { return (p.out_features + kRows - 1) / kRows; }
    static __device__ __forceinline__ int clusters_along_tokens(const Params& p) {
        return (p.tokens + kCluster * kTokens - 1) / (kCluster * kTokens);
    }
    static __device__ __forceinline__ int count(const Params& p) { return row_tiles(p) * clusters_along_tokens(p); }
    static __device__ __forceinline__ int first() { return blockIdx.x / kCluster; }
    static __device__ __forceinline__ int step() { return gridDim.x / kCluster; }

    using Taken = Tile;

    // This block's tile of cluster tile `index`. There are `columns` clusters along tokens.
    static __device__ __forceinline__ Tile at(const Params& p, int index, int columns) {
        const int swath = index / (kSwath * columns);
        const int inside = index - swath * (kSwath * columns);
        const int height = min(kSwath, row_tiles(p) - swath * kSwath);
        const int owned = (swath * kSwath + inside % height) * kRows;
        const int rank = kCluster > 1 ? rank_in_cluster() : 0;
        return {min(owned, p.out_features - kRows), owned, (inside / height * kCluster + rank) * kTokens};
    }
    static __device__ __forceinline__ Tile at(const Params& p, int index) {
        return at(p, index, clusters_along_tokens(p));
    }
};

// A tile of an item. Its tokens are positions in the order sorted by expert, kTokens for each block of a cluster.
// kRowsOfScale rows of W share a scale. The item's entry is read again at each use, since keeping it would occupy
// registers while sums are accumulated.
template <int kTokens, int kCluster, int kRowsOfScale>
struct ItemTile {
    int row;
    int owned;
    int item;
    const ItemEntry* entries;
    const int* rows;  // the rows sorted by expert; null if they are sorted already

    __device__ __forceinline__ int stored_row(const Params& p) const {
        return entries[item].expert * p.out_features + row;
    }
    __device__ __forceinline__ int scaled_row(const Params& p) const {
        return entries[item].expert * ((p.out_features + kRowsOfScale - 1) / kRowsOfScale * kRowsOfScale) + row;
    }
    __device__ __forceinline__ int first_token() const {
        return entries[item].first + (kCluster > 1 ? rank_in_cluster() * kTokens : 0);
    }
    __device__ __forceinline__ int end(const Params&) const { return entries[item].first + entries[item].count; }
    __device__ __forceinline__ int result_row(int token) const { return rows != nullptr ? rows[token] : token; }
    __device__ __forceinline__ int row_of_weights(int token) const {
        return token < entries[item].first + entries[item].count ? result_row(token) : 0;
    }
};

// The order of tile_wgmma's tiles for experts. It is TileOrder with items in place of tiles of tokens. The items of an
// expert are neighbours, so that its weights are read from memory once.
template <int kRows, int kTokens, int kCluster, int kSwath, int kRowsOfScale>
class ItemOrder {
    using Order = TileOrder<kRows, 1, 1, kSwath>;  // each item counts as a tile of one token
    const ItemEntry* const entries_;
    const int* const rows_;
    int items_ = 0;  // number of entries with an expert, which come first

  public:
    using Taken = ItemTile<kTokens, kCluster, kRowsOfScale>;

    // All kThreads threads of the block call this, after group_tokens has ended.
    template <int kThreads>
    static __device__ __forceinline__ ItemOrder create(const ItemParams& p) {
        ItemOrder order(p);
        for (int first = 0; first < p.max_items; first += kThreads) {
            const int i = first + static_cast<int>(threadIdx.x);
            order.items_ += __syncthreads_count(i < p.max_items && order.entries_[i].expert >= 0);
        }
        return order;
    }
    __device__ __forceinline__ explicit ItemOrder(const ItemParams& p)
        : entries_(reinterpret_cast<const ItemEntry*>(p.items)),
          rows_(p.is_sorted ? nullptr : p.items + 4 * p.max_items) {}

    __device__ __forceinline__ int count(const Params& p) const { return Order::row_tiles(p) * items_; }
    static __device__ __forceinline__ int first() { return blockIdx.x / kCluster; }
    static __device__ __forceinline__ int step() { return gridDim.x / kCluster; }

    __device__ __forceinline__ Taken at(const Params& p, int index) const {
        const Tile tile = Order::at(p, index, items_);
        return {tile.row, tile.owned, tile.token, entries_, rows_};
    }

    // Writes zeros to the rows that belong to no expert, with kThreads threads of each block.
    template <int kThreads>
    __device__ __forceinline__ void clear_other_rows(const Params& p, int max_items) const {
        for (int i = items_ + blockIdx.x; i < max_items && entries_[i].count > 0; i += gridDim.x) {
            const ItemEntry entry = entries_[i];
            for (int position = entry.first; position < entry.first + entry.count; ++position) {
                u16* out = static_cast<u16*>(p.out);
                out += static_cast<i64>(rows_ != nullptr ? rows_[position] : position) * p.out_features;
                for (int c = threadIdx.x; c < p.out_features; c += kThreads) out[c] = 0;
            }
        }
    }
};

}  // namespace mglu
