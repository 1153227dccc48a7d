// The copying warpgroup of tile_wgmma.cu: a thread that fills the ring, and three warps that spread x for sparse products.
#pragma once
#include "tile.cuh"

namespace mglu {

// What a stage needs but x: of a cluster, this block's part of the rows, which goes to all of its blocks. Weights past the
// row's end become zeros. Mask bits there flip zeros: they may be anything.
__device__ __forceinline__ void copy_weights(const TileParams& tp, u32 slot, u32 barrier, int row, int stage, u32 bytes_of_x,
                                             u64 policy) {
    constexpr int kRows = kBlockRows / kCluster;
    const u32 rank = kCluster > 1 ? rank_in_cluster() : 0;
    const u32 weights = slot + kXBytes + rank * (kRows * 128);
    const u32 masks = slot + kXBytes + kWeightBytes + rank * (kRows * kMaskRowBytes);
    row += rank * kRows;
    barrier_expect(barrier, bytes_of_x + kWeightBytes + kMaskBytes);
#pragma unroll
    for (int sub = 0; sub < kSub; ++sub)
        copy_box<kCluster>(weights + sub * kBlockRows * 128, tp.weight, (stage * kSub + sub) * 64, row, barrier, policy);
#pragma unroll
    for (int piece = 0; kBulkMasks && piece < kSub / kMaskSpan; ++piece)
        copy_box<kCluster>(masks + piece * kBlockRows * kMaskRowBytes, tp.masks,
                           (stage * (kSub / kMaskSpan) + piece) * kMaskRowBytes, row, barrier, policy);
}

// Into L2, while kernels ahead still run: what the first stage begins with. They may write to it, which the copies then find.
// No more than the copy engine is done with when they have ended: of more than 64 rows only the first box (all of them: 1 to
// 4% less time at 64 rows, up to 2% more at 112).
__device__ __forceinline__ void prefetch_first_stage(const TileParams& tp) {
    constexpr int kRows = kBlockRows / kCluster;
    constexpr bool kAll = kRows <= 64;
    const int row = tile_at(tp.p, first_tile()).row + (kCluster > 1 ? rank_in_cluster() : 0) * kRows;
#pragma unroll
    for (int sub = 0; sub < (kAll ? kSub : 1); ++sub) prefetch_box(tp.weight, sub * 64, row);
#pragma unroll
    for (int piece = 0; kAll && kBulkMasks && piece < kSub / kMaskSpan; ++piece)
        prefetch_box(tp.masks, piece * kMaskRowBytes, row);
}

__device__ __forceinline__ void produce(const TileParams& tp, u32 ring, u32 landed, u32 empty) {
    // For a model, whose other kernels came between (0.4 to 0.8% of a token; nothing where our launches follow each other).
    if constexpr (!kTurned) prefetch_map(tp.x);
    prefetch_map(tp.weight);
    if constexpr (kBulkMasks) prefetch_map(tp.masks);
    const Params& p = tp.p;
    const int stages = stage_count(p);
    const int tiles = tile_count(p);
    const int last_of_x = (p.tokens - 1) / kTokens;  // a block of a cluster may be behind it
    const u64 policy = cache_policy(p.tokens <= kTokens && kPasses == 1);
    // Rows of zeros past the last token count too, but a box has no more than the tokens there are: those took longer.
    const u32 bytes_of_x = kTurned ? kXBytes : kSub * min(kTokens, p.tokens) * 128;
    // A turned x comes when the ring is filled: permute_x has waited for all kernels before itself, so that only x is new.
    const int early = kTurned ? min(kStages, stages) : 0;
    if constexpr (kTurned)
        for (int stage = 0; stage < early; ++stage)
            copy_weights(tp, ring + stage * kStageBytes, landed + 8 * stage, tile_at(p, first_tile()).row, stage, bytes_of_x,
                         policy);
    else
        prefetch_first_stage(tp);
    wait_for_earlier_kernels();
    int to_fill = early;
    Cursor cursor;
    for (int index = first_tile(); index < tiles; index += tile_step()) {
        const Tile tile = tile_at(p, index);
        for (int pass = 0; pass < kPasses; ++pass) {
            const u8* turned = static_cast<const u8*>(p.x);
            turned += static_cast<i64>(min(tile.token / kTokens, last_of_x)) * stages * kXBytes;
            for (int stage = 0; stage < stages; ++stage, turned += kXBytes) {
                const u32 slot = ring + cursor.slot * kStageBytes;
                const u32 barrier = landed + 8 * cursor.slot;
                if (to_fill > 0) {
                    --to_fill;
                } else {
                    barrier_wait(empty + 8 * cursor.slot, cursor.parity ^ 1);
                    copy_weights(tp, slot, barrier, tile.row, stage, bytes_of_x, policy);
                }
                if constexpr (kTurned) {
                    copy_bulk(slot, turned, kXBytes, barrier);
                } else {
                    // For sparse products, to where the second half of it goes in the end.
#pragma unroll
                    for (int sub = 0; sub < kSub; ++sub)
                        copy_box<1>(slot + (sub + 1) * kChunkOfX - kTokens * 128, tp.x, (stage * kSub + sub) * 64, tile.token,
                                    barrier, cache_policy(false));
                }
                cursor.advance();
            }
        }
    }
    // The other blocks of the cluster tell this one's barriers when they are done with a stage: it must be there to hear it.
    for (int s = 0; kCluster > 1 && s < kStages; ++s, cursor.advance())
        barrier_wait(empty + 8 * cursor.slot, cursor.parity ^ 1);
}

// --- the warps that put zeros between the columns of x ---

constexpr int kSpreaders = 3;                // beside the copying thread's
constexpr int kPieces = kSub * kTokens / 8;  // of a stage: 8 tokens of a chunk, whose columns lie where its second half goes
// Pieces that a warp has in registers at a time: all of its own, if those who multiply can spare them.
constexpr int kBatch = kConsumers == 1 || !kManySums ? (kPieces + kSpreaders - 1) / kSpreaders : 1;

// A lane takes the octet `lane % 8` of tokens lane / 8 and lane / 8 + 4 of each piece.
__device__ __forceinline__ void spread(u32 x, int warp, int lane) {
    const u32 half = lane % 8 / 4;  // of the chunk, where the octet goes
    const u32 from = kTokens * 128 + lane / 8 * 128 + (lane % 8 ^ lane / 8) * 16;
    // Of eight lanes, four put their even columns first and the others their odd ones: in different banks.
    const u32 to = half * (kTokens * 128) + lane / 8 * 128 + (lane % 8 ^ lane / 8) * 16;
    const u32 first = half ? 0x4432 : 0x4410;
    const u32 second = half ? 0x4410 : 0x4432;
    constexpr u32 kOther = 4 * 128 + 4 * 16;  // bits of an address that differ for the other token
    const auto start_of = [x](int piece) { return x + piece / (kTokens / 8) * kChunkOfX + piece % (kTokens / 8) * 1024; };
#pragma unroll 1
    for (int start = warp; start < kPieces; start += kBatch * kSpreaders) {
        Vec16 columns[kBatch][2];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const int piece = start + i * kSpreaders;
            if (piece < kPieces) {
                columns[i][0] = load_shared_16(start_of(piece) + from);
                columns[i][1] = load_shared_16(start_of(piece) + (from ^ kOther));
            }
        }
        __syncwarp();  // all is read before any is overwritten
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const int piece = start + i * kSpreaders;
            if (piece >= kPieces) break;
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                Vec16 one, other;
#pragma unroll
                for (int w = 0; w < 4; ++w) {
                    one.word[w] = __byte_perm(columns[i][r].word[w], 0, first);
                    other.word[w] = __byte_perm(columns[i][r].word[w], 0, second);
                }
                store_shared_16(start_of(piece) + (to ^ r * kOther), one);
                store_shared_16(start_of(piece) + (to ^ r * kOther ^ 64), other);
            }
        }
    }
}

__device__ __forceinline__ void spread_stages(const Params& p, u32 ring, u32 landed, u32 full) {
    const int lane = threadIdx.x % 32;
    const int tiles = (tile_count(p) - first_tile() + tile_step() - 1) / tile_step();  // of this block
    Cursor cursor;
#pragma unroll 1
    for (int left = tiles * kPasses * stage_count(p); left > 0; --left) {
        barrier_wait(landed + 8 * cursor.slot, cursor.parity);
        spread(ring + cursor.slot * kStageBytes, threadIdx.x % 128 / 32 - 1, lane);
        shared_is_written();
        __syncwarp();
        if (lane == 0) barrier_arrive(full + 8 * cursor.slot);
        cursor.advance();
    }
}

}  // namespace mglu
