// The producer warpgroup of tile_wgmma.cu: one thread that loads stages into the ring, and for sparse products three
// warps that expand x with zeros.
#pragma once
#include "tile.cuh"

namespace mglu {

// Loads W and masks of a stage. In a cluster, each block loads its share of the rows for all blocks. Weights past the
// end of a row become zeros. Mask bits past the end may be anything, since they flip or select zeros.
__device__ __forceinline__ void load_weights_and_masks(const TileParams& tp, u32 slot, u32 barrier, int row, int stage,
                                                       u32 x_bytes, u64 policy) {
    constexpr int kRows = kBlockRows / kCluster;
    const u32 rank = kCluster > 1 ? rank_in_cluster() : 0;
    const u32 weights = slot + kXBytes + rank * (kRows * kWeightRowBytes);
    const u32 masks = slot + kXBytes + kWeightBytes + rank * (kRows * kMaskRowBytes);
    row += rank * kRows;
    barrier_arrive_expect_bytes(barrier, x_bytes + kWeightBytes + kMaskBytes);
#pragma unroll
    for (int chunk = 0; chunk < kStageChunks; ++chunk)
        tma_load_box<kCluster>(weights + chunk * kWeightChunkBytes, tp.weight_map,
                               (stage * kStageChunks + chunk) * kWeightBoxColumns, row, barrier, policy);
#pragma unroll
    for (int span = 0; kBulkMasks && span < kStageChunks / kMaskSpan; ++span)
        tma_load_box<kCluster>(masks + span * kBlockRows * kMaskRowBytes, tp.masks_map,
                               (stage * (kStageChunks / kMaskSpan) + span) * kMaskRowBytes, row, barrier, policy);
}

// Prefetches the beginning of the first stage into L2 while earlier kernels still run. These kernels may write to W,
// but the loads after the wait see what they wrote. A block of up to 64 rows prefetches all boxes, which saves 1 to 4%
// of the time. A block of more rows prefetches one box, since all boxes would not arrive before the wait ends (2% more
// time at 112 rows).
__device__ __forceinline__ void prefetch_first_stage(const TileParams& tp, const Tiles& tiles) {
    constexpr int kRows = kBlockRows / kCluster;
    constexpr bool kAll = kRows <= 64;
    const int row = tiles.at(tp, tiles.first()).stored_row(tp) + (kCluster > 1 ? rank_in_cluster() : 0) * kRows;
#pragma unroll
    for (int chunk = 0; chunk < (kAll ? kStageChunks : 1); ++chunk)
        tma_prefetch_box(tp.weight_map, chunk * kWeightBoxColumns, row);
#pragma unroll
    for (int span = 0; kAll && kBulkMasks && span < kStageChunks / kMaskSpan; ++span)
        tma_prefetch_box(tp.masks_map, span * kMaskRowBytes, row);
}

__device__ __forceinline__ void produce(const TileParams& tp, const Tiles& tiles, u32 ring, u32 landed, u32 empty) {
    // Other kernels may have evicted the descriptors. In a model this prefetch saves 0.4 to 0.8% of a token's time; in
    // consecutive launches of this kernel it saves nothing.
    if constexpr (!kTiledX) tma_prefetch_descriptor(tp.x_map);
    tma_prefetch_descriptor(tp.weight_map);
    if constexpr (kBulkMasks) tma_prefetch_descriptor(tp.masks_map);
    const Params& p = tp;
    const int stages = stage_count(p);
    const int count = tiles.count(p);
    const int last_x_tile = (p.tokens - 1) / kTokens;  // the last block of a cluster may be past this tile
    // With experts, W counts as read once: most experts have one item, and an expert's items run at the same time.
    const u64 policy = cache_policy((kExperts || p.tokens <= kTokens) && kPasses == 1);
    // The bytes that barriers expect include zeros past the end of a row. A box has at most as many rows as there are
    // tokens, since loading rows past the last token would cost time.
    const u32 x_bytes = kTiledX ? kXBytes : kStageChunks * min(kTokens, p.tokens) * 128;
    // If x is copied, W and masks fill the ring before the wait. The kernel that copies x has waited for all earlier
    // kernels, so only the copy of x may be incomplete.
    const int prefilled = kCopiedX && (!kExperts || tiles.first() < count) ? min(kStages, stages) : 0;
    if constexpr (kCopiedX)
        for (int stage = 0; stage < prefilled; ++stage)
            load_weights_and_masks(tp, ring + stage * kStageBytes, landed + 8 * stage,
                                   tiles.at(p, tiles.first()).stored_row(p), stage, x_bytes, policy);
    else if constexpr (!kExperts) prefetch_first_stage(tp, tiles);
    wait_for_earlier_kernels();
    int left_prefilled = prefilled;
    RingPosition position;
    for (int index = tiles.first(); index < count; index += tiles.step()) {
        const LaunchTile tile = tiles.at(p, index);
        for (int pass = 0; pass < kPasses; ++pass) {
            const u8* permuted_x = static_cast<const u8*>(p.x);
            permuted_x += static_cast<i64>(min(tile.first_token() / kTokens, last_x_tile)) * stages * kXBytes;
            for (int stage = 0; stage < stages; ++stage, permuted_x += kXBytes) {
                const u32 slot = ring + position.slot * kStageBytes;
                const u32 barrier = landed + 8 * position.slot;
                if (left_prefilled > 0) {
                    --left_prefilled;
                } else {
                    barrier_wait(empty + 8 * position.slot, position.parity ^ 1);
                    load_weights_and_masks(tp, slot, barrier, tile.stored_row(p), stage, x_bytes, policy);
                }
                if constexpr (kTiledX) {
                    bulk_copy(slot, permuted_x, kXBytes, barrier);
                } else {
                    // For sparse products x arrives in the second half of the chunk's memory, where the expansion reads
                    // it.
#pragma unroll
                    for (int chunk = 0; chunk < kStageChunks; ++chunk)
                        tma_load_box<1>(slot + (chunk + 1) * kXChunkBytes - kTokens * 128, tp.x_map,
                                        (stage * kStageChunks + chunk) * kChunkColumns, tile.first_token(), barrier,
                                        cache_policy(false));
                }
                position.advance();
            }
        }
    }
    // Do not exit yet: other blocks of the cluster still signal this block's barriers when they release a stage.
    for (int s = 0; kCluster > 1 && s < kStages; ++s, position.advance())
        barrier_wait(empty + 8 * position.slot, position.parity ^ 1);
}

// --- the warps that put a zero after each element of x ---

constexpr int kExpandWarps = 3;                           // the warpgroup's fourth warp contains the producer thread
constexpr int kTokenGroups = kStageChunks * kTokens / 8;  // token groups of a stage, each 8 tokens of a chunk
// The number of token groups that a warp holds in registers at once: all of its groups if the consumers leave enough
// registers, else one.
constexpr int kGroupsAtOnce =
    kConsumers == 1 || !kFewSpareRegisters ? (kTokenGroups + kExpandWarps - 1) / kExpandWarps : 1;

// Expands x of a stage in place. A lane takes 8 columns, from 8 (lane % 8) on, of tokens lane / 8 and lane / 8 + 4 of
// each token group.
__device__ __forceinline__ void expand_x_of_stage(u32 x, int warp, int lane) {
    const u32 half = lane % 8 / 4;  // the half of the chunk that contains the lane's columns
    const u32 from = kTokens * 128 + lane / 8 * 128 + (lane % 8 ^ lane / 8) * 16;
    // Of eight lanes, four write their even columns first and the other four write their odd columns first, so that
    // banks do not conflict.
    const u32 to = half * (kTokens * 128) + lane / 8 * 128 + (lane % 8 ^ lane / 8) * 16;
    const u32 first = half ? 0x4432 : 0x4410;
    const u32 second = half ? 0x4410 : 0x4432;
    constexpr u32 kOther = 4 * 128 + 4 * 16;  // address bits in which the lane's two tokens differ
    const auto start_of = [x](int group) {
        return x + group / (kTokens / 8) * kXChunkBytes + group % (kTokens / 8) * 1024;
    };
#pragma unroll 1
    for (int start = warp; start < kTokenGroups; start += kGroupsAtOnce * kExpandWarps) {
        Vec16 columns[kGroupsAtOnce][2];
#pragma unroll
        for (int i = 0; i < kGroupsAtOnce; ++i) {
            const int group = start + i * kExpandWarps;
            if (group < kTokenGroups) {
                columns[i][0] = load_shared_16(start_of(group) + from);
                columns[i][1] = load_shared_16(start_of(group) + (from ^ kOther));
            }
        }
        __syncwarp();  // all lanes have read; now they may write in place
#pragma unroll
        for (int i = 0; i < kGroupsAtOnce; ++i) {
            const int group = start + i * kExpandWarps;
            if (group >= kTokenGroups) break;
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                Vec16 one, other;
#pragma unroll
                for (int w = 0; w < 4; ++w) {
                    one.word[w] = __byte_perm(columns[i][r].word[w], 0, first);
                    other.word[w] = __byte_perm(columns[i][r].word[w], 0, second);
                }
                store_shared_16(start_of(group) + (to ^ r * kOther), one);
                store_shared_16(start_of(group) + (to ^ r * kOther ^ 64), other);
            }
        }
    }
}

__device__ __forceinline__ void expand_x(const Params& p, const Tiles& tiles, u32 ring, u32 landed, u32 full) {
    const int lane = threadIdx.x % 32;
    const int count = (tiles.count(p) - tiles.first() + tiles.step() - 1) / tiles.step();  // tiles of this block
    RingPosition position;
#pragma unroll 1
    for (int left = count * kPasses * stage_count(p); left > 0; --left) {
        barrier_wait(landed + 8 * position.slot, position.parity);
        expand_x_of_stage(ring + position.slot * kStageBytes, threadIdx.x % 128 / 32 - 1, lane);
        fence_async_proxy();
        __syncwarp();
        if (lane == 0) barrier_arrive(full + 8 * position.slot);
        position.advance();
    }
}

}  // namespace mglu
