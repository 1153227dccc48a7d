// How tile_wgmma.cu cuts its work: tiles, stages of the ring, shares of the masks, registers.
#pragma once
#include "activation.cuh"
#include "params.cuh"
#include "wgmma.cuh"

namespace mglu {

constexpr int kType = MGLU_ELEMENT;
constexpr int kMasks = MGLU_N_MASKS;
constexpr Activation kActivation = static_cast<Activation>(MGLU_ACTIVATION);
constexpr int kRouteType = MGLU_ROUTE;             // -1: no route weights
constexpr int kTokens = MGLU_TOKEN_COLUMNS;        // tokens of a tile: N of the wgmma
constexpr int kBlockRows = MGLU_BLOCK_ROWS;        // rows of W of a tile, a multiple of 16
constexpr int kMaskGroups = MGLU_MASK_GROUPS;      // warpgroups that share 64 rows, each with its part of the masks
constexpr int kPasses = MGLU_PASSES;               // over k, each with as many of the masks
constexpr int kStages = MGLU_STAGES;               // depth of the ring
constexpr int kSub = MGLU_SUB;                     // 64-wide chunks of k a stage
constexpr int kSteps = MGLU_STEPS;                 // wgmmas of 16 columns issued together: 1, 2 or 4
constexpr int kCluster = MGLU_CLUSTER;             // blocks of neighbouring tokens that bring each other W and its masks
constexpr bool kSparse = MGLU_SPARSE != 0;         // masks are places of sparse products, instead of flips of signs
constexpr bool kTurned = MGLU_PERMUTED != 0;         // p.x is the copy that permute_x.cu made, launched just before
constexpr bool kBulkMasks = MGLU_BULK_MASKS != 0;  // rows of masks are 16-byte aligned, so that the copy engine takes them

constexpr int kRowGroups = (kBlockRows + 63) / 64;
constexpr int kConsumers = kRowGroups * kMaskGroups;
constexpr int kThreads = 128 * (kConsumers + 1);
constexpr int kColumns = kTokens / 2;  // sums of one product in a thread
constexpr int kSwath = 8;              // tiles of rows that are walked together along the tokens
constexpr int kPassMasks = kMasks / kPasses;
static_assert(kBlockRows % 16 == 0 && kBlockRows >= 64, "whole warps of rows, and one warpgroup at least");
static_assert(kMaskGroups == 1 || kMaskGroups == 2, "one warpgroup for all masks, or two");
static_assert(kBlockRows / kCluster % 8 == 0, "a block brings whole swizzles of 8 rows");
static_assert(kConsumers <= 4, "registers for four multiplying warpgroups at most");
static_assert(kPasses == 1 || (kPassMasks * kPasses == kMasks && kPassMasks % 4 == 0), "whole words of masks a pass");

// Registers a thread, multiples of 8: what the launch gives each, 168, 128 or 96, moved from the copying warpgroup to the
// others. Its warps need more of them if they spread x, and get more still where those who multiply have few sums.
constexpr bool kManySums = (kPassMasks / kMaskGroups + 1) * kTokens / 2 > 112;
constexpr int kCopyRegisters = !kSparse ? 24 : kManySums ? 40 : 72;
constexpr int kLaunchRegisters = kConsumers == 2 ? 3 * 168 : kConsumers == 3 ? 4 * 128 : 5 * 96;
constexpr int kRegisters = kConsumers == 1 ? 255 : (kLaunchRegisters - kCopyRegisters) / (8 * kConsumers) * 8;

// A stage: x [kSub][kTokens][64] and W [kSub][kBlockRows][64], both with the 16-byte vector v of row r at v ^ (r % 8), masks
// [kSub / kMaskSpan][kBlockRows][8 kMaskSpan kMasks]. The copy engine moves multiples of 16 bytes a row. For sparse products
// x is [kSub][2][kTokens][64]: of 32 columns, the even ones, each with 0 after it, then the odd ones.
constexpr int kMaskSpan = kMasks % 2 == 0 ? 1 : 2;
constexpr int kMaskRowBytes = 8 * kMaskSpan * kMasks;
constexpr bool kSwizzleMasks = kMasks == 16;  // rows of 128 bytes, as those of W
constexpr int kChunkOfX = kTokens * (kSparse ? 256 : 128);
constexpr int kXBytes = kSub * kChunkOfX;
constexpr int kWeightBytes = kSub * kBlockRows * 128;
constexpr int kMaskBytes = kBulkMasks ? kSub / kMaskSpan * kBlockRows * kMaskRowBytes : 0;
constexpr int kStageBytes = (kXBytes + kWeightBytes + kMaskBytes + 1023) / 1024 * 1024;
static_assert(!kBulkMasks || kSub % kMaskSpan == 0, "an odd number of masks goes by two chunks");

// The sums of a pass (t, where it is among them, then one a mask) are dealt out to the warpgroups of the same rows.
__host__ __device__ constexpr int share_start(int group, int sums) {
    const int longer = sums % kMaskGroups;  // as many shares are one sum longer, the first ones
    return group * (sums / kMaskGroups) + (group < longer ? group : longer);
}

// Two warpgroups of the same rows keep step, whichever has t: leaving it out of later passes made them a fifth slower.
constexpr bool kTotalEachPass = kPasses == 1 || kMaskGroups == 2;

// Behind the ring: t and the terms so far, which a warpgroup hands on to the second one of its rows, and to the next pass;
// then the barriers.
constexpr int kExchangeBytes = kMaskGroups == 2 || kPasses > 1 ? kRowGroups * kColumns * 1024 : 0;

struct TileParams {
    Params p;
    TensorMap x;       // [tokens][in_features] in boxes of kTokens (or all tokens, if they are fewer) by 64
    TensorMap weight;  // [out_features][in_features] in boxes of kBlockRows / kCluster by 64
    TensorMap masks;   // [out_features][in_features / 8 kMasks] in boxes of kBlockRows / kCluster by kMaskRowBytes
};

struct Tile {
    int row;    // where the block's rows start: higher than `owned` where they would run over the end
    int owned;  // rows from here on are this tile's to write
    int token;
};

// The blocks of a cluster have the same rows, and tokens that follow each other: the last ones may have none to write.
__device__ __forceinline__ int clusters_along_tokens(const Params& p) {
    return (p.tokens + kCluster * kTokens - 1) / (kCluster * kTokens);
}

// Of a cluster's tiles, which count as one, that of this block. Swaths of rows, in each the tokens, so that blocks at work at
// the same time share W and x in L2.
__device__ __forceinline__ Tile tile_at(const Params& p, int index) {
    const int row_tiles = (p.out_features + kBlockRows - 1) / kBlockRows;
    const int columns = clusters_along_tokens(p);
    const int swath = index / (kSwath * columns);
    const int inside = index - swath * (kSwath * columns);
    const int height = min(kSwath, row_tiles - swath * kSwath);
    const int owned = (swath * kSwath + inside % height) * kBlockRows;
    const int rank = kCluster > 1 ? rank_in_cluster() : 0;
    return {min(owned, p.out_features - kBlockRows), owned, (inside / height * kCluster + rank) * kTokens};
}

__device__ __forceinline__ int tile_count(const Params& p) {
    return (p.out_features + kBlockRows - 1) / kBlockRows * clusters_along_tokens(p);
}
__device__ __forceinline__ int first_tile() { return blockIdx.x / kCluster; }
__device__ __forceinline__ int tile_step() { return gridDim.x / kCluster; }

__device__ __forceinline__ int stage_count(const Params& p) { return (p.in_features + 64 * kSub - 1) / (64 * kSub); }

// A place in the ring, and how often the ring has been gone round (its lowest bit).
struct Cursor {
    int slot = 0;
    u32 parity = 0;

    __device__ __forceinline__ void advance() {
        if (++slot == kStages) {
            slot = 0;
            parity ^= 1;
        }
    }
};

}  // namespace mglu
