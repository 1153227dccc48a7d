// MGLU for a few tokens on tensor cores: W and the masks are read once, masked in registers.
//
// With f_i = x (W, sign flipped where M_i = 1)^T and t = x W^T: gate_i = (t - f_i) / 2, value_i = (t + f_i) / 2.
// A warp owns 16 rows of W and every kSplitK-th stage of k. It feeds itself: its lanes copy W and mask bytes
// into a ring of kStages stages in shared memory with cp.async, so loads never wait for arithmetic, need no
// registers, and no two warps ever wait for each other before the end. Per 16 x 64 weights it issues 4 (kMasks + 1)
// MMAs with the flipped weights as A and x as B (8 columns: 1 to 8 tokens cost the same). At the end, each warp
// leaves its sums in shared memory, and the block adds the kSplitK parts in a fixed order, applies activation,
// product, route weights and the sum over masks.
//
// The order of a row's sums depends on in_features and the launch configuration only, not on the other tokens.
//
// Needs: in_features % 8 == 0, weight rows 16-byte aligned, mask rows aligned to MGLU_MASK_VECTOR, masks contiguous
// inside a row, out_features >= 16.
#include "activation.cuh"
#include "element.cuh"
#include "mask_fragment.cuh"
#include "params.cuh"
#include "ptx.cuh"
#include "finish.cuh"
#include "stage_ring.cuh"

namespace mglu {

constexpr int kType = MGLU_ELEMENT;
constexpr int kMasks = MGLU_N_MASKS;
constexpr int kActivation = MGLU_ACTIVATION;
constexpr int kRouteType = MGLU_ROUTE;            // -1: no route weights
constexpr int kTiles = MGLU_TILES;                // 16-row tiles a block
constexpr int kSplitK = MGLU_SPLIT_K;             // warps that share a tile
constexpr int kStages = MGLU_STAGES;              // depth of a warp's ring
constexpr int kSub = MGLU_SUB;                    // 64-wide chunks of k a stage
constexpr int kTokenTiles = MGLU_TOKEN_TILES;     // MMA columns / 8
constexpr int kBlockTokens = MGLU_BLOCK_TOKENS;   // tokens of a block, at most 8 * kTokenTiles: their x is kept on chip
constexpr int kTokenColumns = MGLU_TOKEN_COLUMNS; // columns kept: 1 for one token, else 8 * kTokenTiles
constexpr int kMaskVector = MGLU_MASK_VECTOR;     // bytes a lane copies of the masks
constexpr int kBlocksPerSm = MGLU_BLOCKS_PER_SM;
constexpr bool kEarlyWeights = MGLU_EARLY_WEIGHTS;

// Masks that no token routes to are left out, but where W's bytes are the limit anyway.
constexpr bool kMayChoose = kRouteType >= 0 && kMasks > 4;
constexpr u32 kAllMasks = (1u << kMasks) - 1;

// Masks whose bits are in registers at a time. With branches between 16 masks, 8 are too many for 128 registers.
constexpr int kGroup = kMayChoose && kMasks == 16 ? 4 : MGLU_MASK_GROUP;

constexpr int kGroups = kMasks / kGroup;
static_assert(kGroups * kGroup == kMasks, "groups are equal");
constexpr int kWarps = kTiles * kSplitK;
constexpr int kThreads = 32 * kWarps;
constexpr int kRows = 16;
using Stage = StageShape<kRows, 8 * kSub, kMasks, kMaskVector, true>;
constexpr int kWeightBytes = Stage::kWeightBytes;
constexpr int kMaskRowBytes = Stage::kMaskRowBytes;
constexpr int kStageBytes = Stage::kBytes;
constexpr bool kSwizzleMasks = Stage::kSwizzleMasks;
constexpr int kPartialFloats = (kMasks + 1) * kRows * kTokenColumns;
constexpr int kRingBytes = kStages * kStageBytes;
constexpr int kWarpBytes = kRingBytes > 4 * kPartialFloats ? kRingBytes : (4 * kPartialFloats + 127) / 128 * 128;
using Output = OutputShape<kType, kMasks, kActivation, kRouteType, kTiles, kSplitK, kRows, kTokenColumns, kWarpBytes, true>;

// x in shared memory, as B fragments: for each 64-wide chunk of k and each token, lane quarter q's eight registers
// (x of A_j, x of B_j), where A = octet 2q and B = octet 2q + 1 of the chunk. The two halves of a token's 128 bytes
// alternate by the token's parity so that two tokens of one phase use different banks.
__device__ __forceinline__ u32 x_fragment_address(u32 base, int chunk, int tokens, int token, int q, int half) {
    return base + ((chunk * tokens + token) * 8 + (2 * q + half ^ (token & 1))) * 16;
}

__device__ __forceinline__ Vec16 load_x_octet(const Params& p, int token, int octet) {
    const u16* row = static_cast<const u16*>(p.x) + token * p.x_row_stride;
    Vec16 v = {};
    if (octet * 8 >= p.in_features) return v;
    if (p.x_is_vectorizable) return *reinterpret_cast<const Vec16*>(row + octet * 8);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const i64 k = octet * 8 + 2 * j;
        v.word[j] = row[k * p.x_column_stride] | static_cast<u32>(row[(k + 1) * p.x_column_stride]) << 16;
    }
    return v;
}

__device__ __forceinline__ void store_x_fragments(const Params& p, u32 base, int chunks) {
    const int items = p.tokens * chunks * 4;
    for (int item = threadIdx.x; item < items; item += kThreads) {
        const int q = item % 4;
        const int chunk = item / 4 % chunks;
        const int token = item / 4 / chunks;
        const Vec16 a = load_x_octet(p, token, chunk * 8 + 2 * q);
        const Vec16 b = load_x_octet(p, token, chunk * 8 + 2 * q + 1);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const u32 address = x_fragment_address(base, chunk, p.tokens, token, q, half);
            asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address),
                         "r"(pick_bytes<0x5410>(a.word[2 * half], b.word[2 * half])),
                         "r"(pick_bytes<0x7632>(a.word[2 * half], b.word[2 * half])),
                         "r"(pick_bytes<0x5410>(a.word[2 * half + 1], b.word[2 * half + 1])),
                         "r"(pick_bytes<0x7632>(a.word[2 * half + 1], b.word[2 * half + 1]))
                         : "memory");
        }
    }
}

// Sums over k of one warp: [0] is t, [1 + i] is f_i.
struct Accumulators {
    float sum[kMasks + 1][kTokenTiles][4];
};

// One row's 16 weights of a chunk, as the pairs (A_j, B_j).
struct WeightPairs {
    u32 pair[8];

    __device__ __forceinline__ WeightPairs(u32 row_address, int row, int q) {
        const Vec16 a = load_shared_16(row_address + ((2 * q) ^ (row & 1)) * 16);
        const Vec16 b = load_shared_16(row_address + ((2 * q + 1) ^ (row & 1)) * 16);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            pair[2 * j] = pick_bytes<0x5410>(a.word[j], b.word[j]);
            pair[2 * j + 1] = pick_bytes<0x7632>(a.word[j], b.word[j]);
        }
    }
};

// The mask words of one lane for one group of masks, read through the swizzle that StageLoader wrote with.
__device__ __forceinline__ MaskWords<kGroup> load_masks(u32 stage_masks, int row, int sub, int q, int group) {
    const u32 base = stage_masks + row * kMaskRowBytes;
    const u32 column = (sub * 8 + 2 * q) * kMasks;
    if constexpr (kGroup == kMasks && !kSwizzleMasks) {
        return load_mask_words<kGroup>(base + column);
    } else {
        static_assert(kSwizzleMasks || kGroup < kMasks ? kGroup % 4 == 0 : true, "a group is whole words");
        MaskWords<kGroup> masks;
#pragma unroll
        for (int w = 0; w < kGroup / 4; ++w) {
            u32 at_a = column + group * kGroup + 4 * w;
            u32 at_b = at_a + kMasks;
            if constexpr (kSwizzleMasks) {
                at_a ^= (row & 1) * 16;
                at_b ^= (row & 1) * 16;
            }
            const u32 from_a = load_shared_4(base + at_a);
            const u32 from_b = load_shared_4(base + at_b);
            masks.word[2 * w] = pick_bytes<0x5410>(from_a, from_b);
            masks.word[2 * w + 1] = pick_bytes<0x7632>(from_a, from_b);
        }
        return masks;
    }
}

// What a lane holds of one 16 x 64 chunk: rows g and g + 8 of W, and x as B fragments.
struct Chunk {
    WeightPairs top, bottom;
    Vec16 x[kTokenTiles][2];

    __device__ __forceinline__ Chunk(u32 weights, int g, int q, u32 x_base, int chunk, int tokens)
        : top(weights + g * 128, g, q), bottom(weights + (g + 8) * 128, g, q) {
#pragma unroll
        for (int n = 0; n < kTokenTiles; ++n) {
            // Columns past the last token repeat it; they are never written.
            const int token = min(n * 8 + g, tokens - 1);
#pragma unroll
            for (int half = 0; half < 2; ++half)
                x[n][half] = load_shared_16(x_fragment_address(x_base, chunk, tokens, token, q, half));
        }
    }

    __device__ __forceinline__ void mma(float (&sum)[kTokenTiles][4], int m, u32 a0, u32 a1, u32 a2, u32 a3) const {
#pragma unroll
        for (int n = 0; n < kTokenTiles; ++n)
            mma_16x8x16<kType == kBfloat16>(sum[n], a0, a1, a2, a3, x[n][m / 2].word[2 * (m % 2)],
                                            x[n][m / 2].word[2 * (m % 2) + 1]);
    }

    // t: the weights as they are.
    __device__ __forceinline__ void multiply_plain(Accumulators& acc) const {
#pragma unroll
        for (int m = 0; m < 4; ++m)
            mma(acc.sum[0], m, top.pair[2 * m], bottom.pair[2 * m], top.pair[2 * m + 1], bottom.pair[2 * m + 1]);
    }

    // f_i: signs flipped under each mask of a group; where there are routes, under those that a token routes to.
    __device__ __forceinline__ void multiply_flipped(Accumulators& acc, int group, const MaskWords<kGroup>& top_masks,
                                                     const MaskWords<kGroup>& bottom_masks, u32 routed) const {
        const auto multiply = [&](int m, int i) {
            const int j = 2 * m;
            mma(acc.sum[1 + group * kGroup + i], m, flip_signs(top.pair[j], top_masks.bits(i, j)),
                flip_signs(bottom.pair[j], bottom_masks.bits(i, j)),
                flip_signs(top.pair[j + 1], top_masks.bits(i, j + 1)),
                flip_signs(bottom.pair[j + 1], bottom_masks.bits(i, j + 1)));
        };
        if (!kMayChoose || routed == kAllMasks) {
#pragma unroll
            for (int m = 0; m < 4; ++m)
#pragma unroll
                for (int i = 0; i < kGroup; ++i) multiply(m, i);
        } else {
#pragma unroll
            for (int i = 0; i < kGroup; ++i)
                if (routed >> (group * kGroup + i) & 1)
#pragma unroll
                    for (int m = 0; m < 4; ++m) multiply(m, i);
        }
    }
};

// A warp's sums, [mask][row][token], into the shared memory that was its ring.
__device__ __forceinline__ void store_partial(float* partial, const Accumulators& acc, int g, int q) {
#pragma unroll
    for (int i = 0; i <= kMasks; ++i) {
        float* rows = partial + i * (kRows * kTokenColumns);
        if constexpr (kTokenColumns == 1) {
            if (q == 0) {
                rows[g] = acc.sum[i][0][0];
                rows[g + 8] = acc.sum[i][0][2];
            }
        } else {
#pragma unroll
            for (int n = 0; n < kTokenTiles; ++n) {
                *reinterpret_cast<float2*>(rows + g * kTokenColumns + n * 8 + 2 * q) =
                    make_float2(acc.sum[i][n][0], acc.sum[i][n][1]);
                *reinterpret_cast<float2*>(rows + (g + 8) * kTokenColumns + n * 8 + 2 * q) =
                    make_float2(acc.sum[i][n][2], acc.sum[i][n][3]);
            }
        }
    }
}

// The part of the problem that belongs to one block: up to kBlockTokens tokens.
__device__ __forceinline__ Params token_group(Params p, int first_token) {
    p.x = static_cast<const u16*>(p.x) + first_token * p.x_row_stride;
    p.out = static_cast<u16*>(p.out) + static_cast<i64>(first_token) * p.out_features;
    if constexpr (kRouteType >= 0)
        p.route = static_cast<const typename Element<kRouteType>::Bits*>(p.route) + first_token * p.route_row_stride;
    p.tokens = min(p.tokens - first_token, kBlockTokens);
    return p;
}

}  // namespace mglu

extern "C" __global__ void __launch_bounds__(mglu::kThreads, mglu::kBlocksPerSm)
    mglu_decode_mma(const __grid_constant__ mglu::Params all) {
    using namespace mglu;
    // Blocks of different tokens and the same rows are neighbours, so that all but the first find W in L2.
    const int groups = (all.tokens + kBlockTokens - 1) / kBlockTokens;
    const Params p = token_group(all, blockIdx.x % groups * kBlockTokens);
    extern __shared__ __align__(128) u8 shared[];
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int tile = warp / kSplitK;
    const int part = warp % kSplitK;
    const int g = lane / 4;
    const int q = lane % 4;
    const int first_row = blockIdx.x / groups * (kTiles * kRows);
    // A last tile that would run over the end starts higher instead, and computes some rows a second time.
    const int tile_row = min(first_row + tile * kRows, p.out_features - kRows);
    const int chunks = (p.in_features + 63) / 64;
    const int stages = (chunks + kSub - 1) / kSub;
    const u32 ring = shared_address(shared) + warp * kWarpBytes;
    const u32 x_base = shared_address(shared) + kWarps * kWarpBytes;
    // Warps of the last block with no row of their own still take part in the barriers.
    const int mine = first_row + tile * kRows < p.out_features ? (stages - part + kSplitK - 1) / kSplitK : 0;

    let_next_kernel_start();
    if constexpr (!kEarlyWeights) wait_for_earlier_kernels();
    StageLoader<Stage, kSplitK> loader(p, groups == 1);
    loader.start(p, tile_row, part);
#pragma unroll
    for (int s = 0; s < kStages; ++s) {
        if (s < mine) loader.load_next(ring + s * kStageBytes);
        copy_async_commit();
    }
    u32 routed = ~0u;
    if constexpr (kEarlyWeights) wait_for_earlier_kernels();
    if constexpr (kMayChoose) routed = find_routed<kRouteType, kMasks, kBlockTokens>(p, lane);
    store_x_fragments(p, x_base, stages * kSub);
    __syncthreads();
    if constexpr (kMayChoose) routed = __reduce_or_sync(0xffffffffu, routed);

    Accumulators acc = {};
    u32 slot = ring;
    for (int n = 0; n < mine; ++n) {
        copy_async_wait<kStages - 1>();  // the oldest stage has landed, for this lane's copies
        __syncwarp();                    // and for the other lanes'
        const int stage = part + n * kSplitK;
#pragma unroll
        for (int sub = 0; sub < kSub; ++sub) {
            const Chunk chunk(slot + sub * (kRows * 128), g, q, x_base, stage * kSub + sub, p.tokens);
#pragma unroll
            for (int group = 0; group < kGroups; ++group) {
                const MaskWords<kGroup> top = load_masks(slot + kWeightBytes, g, sub, q, group);
                const MaskWords<kGroup> bottom = load_masks(slot + kWeightBytes, g + 8, sub, q, group);
                if (sub == kSub - 1 && group == kGroups - 1) {
                    // The stage now lives in registers: refill its slot before the arithmetic.
                    __syncwarp();
                    if (n + kStages < mine) loader.load_next(slot);
                    copy_async_commit();
                }
                if (group == 0) chunk.multiply_plain(acc);
                chunk.multiply_flipped(acc, group, top, bottom, routed);
            }
        }
        slot = slot + kStageBytes == ring + kRingBytes ? ring : slot + kStageBytes;
    }

    __syncwarp();
    store_partial(reinterpret_cast<float*>(shared + warp * kWarpBytes), acc, g, q);
    __syncthreads();
    finish<Output>(p, shared, first_row, threadIdx.x);
}
