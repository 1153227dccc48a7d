// Which rows of W and which tokens a block takes, for each kernel of the forward pass. Nothing else depends on how blocks
// are numbered.
#pragma once
#include "params.cuh"
#include "ptx.cuh"

namespace mglu {

// The first row and the first token of a block.
template <class Row>
struct Work {
    Row row;
    int token;
};

// A grid of two dimensions, rows by tokens (plain).
template <int kRows, int kTokens>
__device__ __forceinline__ Work<i64> work_in_grid() {
    return {static_cast<i64>(blockIdx.x) * kRows, static_cast<int>(blockIdx.y) * kTokens};
}

// Blocks with the same rows and different tokens are neighbours, so that only the first reads W from memory
// (decode_mma).
template <int kRows, int kTokens>
__device__ __forceinline__ Work<int> work_of_neighbours(const Params& p) {
    const int groups = (p.tokens + kTokens - 1) / kTokens;
    return {static_cast<int>(blockIdx.x / groups) * kRows, static_cast<int>(blockIdx.x % groups) * kTokens};
}

struct Tile {
    int row;    // first row of the block; lower than `owned` if the tile would run past the end
    int owned;  // the tile writes the rows from here on
    int token;
};

// The tiles of tile_wgmma, whose blocks loop over them. Tiles are ordered by swaths of kSwath row tiles, and by tokens
// within a swath, so that blocks that run at the same time share W and x in L2. The blocks of a cluster have the same
// rows and consecutive tokens; the last block may have no token to write.
template <int kRows, int kTokens, int kCluster, int kSwath>
struct TileOrder {
    static __device__ __forceinline__ int row_tiles(const Params& p) { return (p.out_features + kRows - 1) / kRows; }
    static __device__ __forceinline__ int clusters_along_tokens(const Params& p) {
        return (p.tokens + kCluster * kTokens - 1) / (kCluster * kTokens);
    }
    static __device__ __forceinline__ int count(const Params& p) { return row_tiles(p) * clusters_along_tokens(p); }
    static __device__ __forceinline__ int first() { return blockIdx.x / kCluster; }
    static __device__ __forceinline__ int step() { return gridDim.x / kCluster; }

    // This block's part of the cluster's tile `index`.
    static __device__ __forceinline__ Tile at(const Params& p, int index) {
        const int columns = clusters_along_tokens(p);
        const int swath = index / (kSwath * columns);
        const int inside = index - swath * (kSwath * columns);
        const int height = min(kSwath, row_tiles(p) - swath * kSwath);
        const int owned = (swath * kSwath + inside % height) * kRows;
        const int rank = kCluster > 1 ? rank_in_cluster() : 0;
        return {min(owned, p.out_features - kRows), owned, (inside / height * kCluster + rank) * kTokens};
    }
};

}  // namespace mglu
