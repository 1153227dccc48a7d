// MGLU for a few tokens on sparse tensor cores, which take the mask bits as they are.
//
// A sparse matrix product multiplies two values of A with two of four rows of B, and two bits a value say with which. Here
// A is W, which is not sparse at all, and the four rows of B are (x_k, 0, x_l, 0): a value is multiplied with x or with 0,
// as its mask bit says. So s_i = x (M_i * W)^T takes no instruction a weight: one LOP3 makes 16 mask bits the places of 16
// values. t = x W^T has all values at x. gate_i = s_i and value_i = t - s_i.
//
// A warp owns 16 rows of W and every kSplitK-th stage of k. It feeds itself: its lanes copy W and mask bytes into a ring of
// kStages stages in shared memory with cp.async, so loads never wait for arithmetic, need no registers, and no two warps
// ever wait for each other before the end. x is copied whole, once a block, or by two neighbouring blocks for each other
// (kCluster). Per 16 x 64 weights a warp issues 4 (kMasks + 1) products of 8 columns: 1 to 8 tokens cost the same. At the
// end, each warp leaves its sums in shared memory, and the block adds the kSplitK parts in a fixed order, applies
// activation, product, route weights and the sum over masks.
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
constexpr Activation kActivation = static_cast<Activation>(MGLU_ACTIVATION);
constexpr int kRouteType = MGLU_ROUTE;            // -1: no route weights
constexpr int kTiles = MGLU_TILES;                // 16-row tiles a block
constexpr int kSplitK = MGLU_SPLIT_K;             // warps that share a tile
constexpr int kStages = MGLU_STAGES;              // depth of a warp's ring
constexpr int kSub = MGLU_SUB;                    // 64-wide chunks of k a stage
constexpr int kTokenTiles = MGLU_TOKEN_TILES;     // MMA columns / 8
constexpr int kBlockTokens = MGLU_BLOCK_TOKENS;   // tokens of a block, at most 8 * kTokenTiles: their x is kept on chip
constexpr int kTokenColumns = MGLU_TOKEN_COLUMNS; // columns kept: 1 for one token, else 8 * kTokenTiles
constexpr int kMaskVector = MGLU_MASK_VECTOR;     // bytes a lane copies of the masks
constexpr int kGroup = MGLU_MASK_GROUP;           // masks whose bits are in registers at a time
constexpr int kBlocksPerSm = MGLU_BLOCKS_PER_SM;
constexpr bool kReadOnce = MGLU_READ_ONCE;         // one block has all tokens
constexpr int kCluster = MGLU_CLUSTER;             // blocks that bring each other x: 1 or 2
static_assert(kCluster == 1 || (kReadOnce && kCopyEngine), "the blocks of a cluster have the same tokens");

constexpr int kGroups = kMasks / kGroup;
static_assert(kGroups * kGroup == kMasks, "groups are equal");
constexpr int kWarps = kTiles * kSplitK;
constexpr int kThreads = 32 * kWarps;
constexpr int kRows = 16;
using Stage = StageShape<kRows, 8 * kSub, kMasks, kMaskVector>;
constexpr int kWeightBytes = Stage::kWeightBytes;
constexpr int kMaskRowBytes = Stage::kMaskRowBytes;
constexpr int kStageBytes = Stage::kBytes;
constexpr bool kSwizzleMasks = Stage::kSwizzleMasks;
constexpr int kPartialFloats = (kMasks + 1) * kRows * kTokenColumns;
constexpr int kRingBytes = kStages * kStageBytes;
// A warp's sums take the place of its ring, or, where they are more, that of all rings and of x.
constexpr bool kSumsInRing = 4 * kPartialFloats <= kRingBytes;
constexpr int kSumBytes = kSumsInRing ? kRingBytes : (4 * kPartialFloats + 127) / 128 * 128;
using Output = OutputShape<kType, kMasks, kActivation, kRouteType, kTiles, kSplitK, kRows, kTokenColumns, kSumBytes>;

// x in shared memory: a row a token, in octets, with 16 bytes between rows, so that the words that a warp reads of 8 tokens
// are in different banks. It comes in kXPieces pieces of k, each with a barrier: arithmetic starts with the first.
constexpr int kXPieces = 4;

struct XRows {
    u32 base;
    u32 ready;  // the barriers
    int octets;
    int piece_octets;

    __device__ __forceinline__ XRows(u32 base, int stages, int tokens)
        : base(base), octets(stages * kSub * 8), piece_octets((stages + kXPieces - 1) / kXPieces * (kSub * 8)) {
        ready = base + tokens * row_bytes();
    }

    __device__ __forceinline__ u32 row_bytes() const { return octets * 16 + 16; }

    // All threads store octets from `first` on. What may be copied asynchronously is waited for by whoever calls.
    __device__ __forceinline__ void store(const Params& p, int first) const {
        const u64 policy = cache_policy(false);
        for (int octet = first + threadIdx.x; octet < octets; octet += kThreads) {
            const bool within = octet * 8 < p.in_features;
            const u16* x = static_cast<const u16*>(p.x) + octet * 8 * p.x_column_stride;
            u32 place = base + octet * 16;
            for (int token = 0; token < p.tokens; ++token, place += row_bytes(), x += p.x_row_stride) {
                if (p.x_is_vectorizable && within) {
                    copy_async<16>(place, x, 16, policy);
                    continue;
                }
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const u32 word = within ? x[2 * j * p.x_column_stride] | x[(2 * j + 1) * p.x_column_stride] << 16 : 0;
                    asm volatile("st.shared.b32 [%0], %1;" ::"r"(place + 4 * j), "r"(word) : "memory");
                }
            }
        }
    }

    // The same by the copy engine, but for the zeros past in_features: a piece of a row a lane. Each block of a cluster
    // brings a share of the rows to all of them.
    __device__ __forceinline__ void copy(const Params& p, int warp, int lane) const {
        if (lane >= kXPieces) return;
        const int first = lane * piece_octets;
        const int bytes = max(0, min(piece_octets, p.in_features / 8 - first)) * 16;
        const u32 barrier = ready + 8 * lane;
        if (warp == 0) barrier_expect(barrier, bytes * p.tokens);
        const int rank = kCluster > 1 ? rank_in_cluster() : 0;
        for (int token = warp * kCluster + rank; bytes > 0 && token < p.tokens; token += kWarps * kCluster) {
            const u32 place = base + token * row_bytes() + first * 16;
            const u16* x = static_cast<const u16*>(p.x) + token * p.x_row_stride + first * 8;
            if constexpr (kCluster > 1)
                copy_bulk_to_cluster<kCluster>(place, x, bytes, barrier);
            else
                copy_bulk(place, x, bytes, barrier);
        }
    }
};

// Sums over k of one warp: [0] is t, [1 + i] is s_i.
struct Accumulators {
    float sum[kMasks + 1][kTokenTiles][4];
};

// Where a lane reads, but for what the compiler knows: every other address is one of these plus a constant.
struct Lane {
    u32 weights;         // in a slot: 8 bytes of row g; `source` of four is found by exclusive or
    u32 masks[2];        // in a slot: of row g, octets 2q and 2q + 1
    u32 x[kTokenTiles];  // 4 bytes of a token's first octet

    __device__ __forceinline__ Lane(int g, int q, const XRows& rows, int tokens) {
        weights = g * 128 + g % 4 * 32 + q * 8;
        // As StageLoader swizzled them.
        const u32 flip = kSwizzleMasks ? g % 2 * 16 : 0;
#pragma unroll
        for (int i = 0; i < 2; ++i) masks[i] = kWeightBytes + g * kMaskRowBytes + ((2 * q + i) * kMasks ^ flip);
        // Columns past the last token repeat it; they are never written.
#pragma unroll
        for (int n = 0; n < kTokenTiles; ++n) x[n] = rows.base + min(n * 8 + g, tokens - 1) * rows.row_bytes() + q * 4;
        keep(weights), keep(masks[0]), keep(masks[1]);
#pragma unroll
        for (int n = 0; n < kTokenTiles; ++n) keep(x[n]);
    }
};

// The mask words of a lane for one group of masks, of row g or g + 8 (`half`).
__device__ __forceinline__ MaskWords<kGroup> load_masks(u32 slot, const Lane& lane, int half, int sub, int group) {
    const u32 offset = half * (8 * kMaskRowBytes) + sub * (8 * kMasks) + group * kGroup;
    if constexpr (kGroup == kMasks && !kSwizzleMasks) {
        return load_mask_words<kGroup>(slot + lane.masks[0] + offset);
    } else {
        constexpr int kWords = kGroup / 4 > 0 ? kGroup / 4 : 1;
        static_assert((kGroup == kMasks && !kSwizzleMasks) || kGroup == 4 || kGroup == 8 || kGroup == 16,
                      "a group is whole words");
        u32 a[kWords], b[kWords];
        load_shared_words(a, slot + lane.masks[0] + offset);
        load_shared_words(b, slot + lane.masks[1] + offset);
        MaskWords<kGroup> masks;
#pragma unroll
        for (int w = 0; w < kGroup / 4; ++w) {
            masks.word[2 * w] = pick_bytes<0x5410>(a[w], b[w]);
            masks.word[2 * w + 1] = pick_bytes<0x7632>(a[w], b[w]);
        }
        return masks;
    }
}

// What a lane holds of one 16 x 64 chunk: A and B of four products. Of each octet its x are those of weights 2q and 2q + 1.
struct Chunk {
    SparseWeights weights[2];     // the even ones and the odd ones
    u32 x[kTokenTiles][2][2][4];  // [.][pair][odd][.]: x below, 0 above

    __device__ __forceinline__ Chunk(u32 rows, const Lane& lane, int x_offset) {
#pragma unroll
        for (int source = 0; source < 4; ++source) {
            const u32 address = (rows + lane.weights) ^ source * 32;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                u32 word[2];
                load_shared_words(word, address + half * 1024);
                weights[0].set(source, half, word, 0);
                weights[1].set(source, half, word, 1);
            }
        }
#pragma unroll
        for (int n = 0; n < kTokenTiles; ++n)
#pragma unroll
            for (int octet = 0; octet < 8; ++octet) {
                const u32 word = load_shared_4(lane.x[n] + x_offset + octet * 16);
                x[n][octet / 4][0][octet % 4] = word & 0xffffu;
                x[n][octet / 4][1][octet % 4] = word >> 16;
            }
    }

    template <int kPair, int kOdd>
    __device__ __forceinline__ void mma(float (&sum)[kTokenTiles][4], u32 places) const {
#pragma unroll
        for (int n = 0; n < kTokenTiles; ++n)
            mma_sparse_16x8x32<kType == kBfloat16, kPair>(sum[n], weights[kOdd].value[kPair], x[n][kPair][kOdd], places);
    }

    // t: every weight.
    __device__ __forceinline__ void multiply_all(Accumulators& acc, const PlaceConstants& constants) const {
        mma<0, 0>(acc.sum[0], constants.all_at_x);
        mma<0, 1>(acc.sum[0], constants.all_at_x);
        mma<1, 0>(acc.sum[0], constants.all_at_x);
        mma<1, 1>(acc.sum[0], constants.all_at_x);
    }

    // s_i, for each mask of a group.
    __device__ __forceinline__ void multiply_masked(Accumulators& acc, int group, const Places<kGroup>& even,
                                                    const Places<kGroup>& odd) const {
        float(*sums)[kTokenTiles][4] = acc.sum + 1 + group * kGroup;
#pragma unroll
        for (int i = 0; i < kGroup; ++i) mma<0, 0>(sums[i], even.of[i]);
#pragma unroll
        for (int i = 0; i < kGroup; ++i) mma<0, 1>(sums[i], odd.of[i]);
#pragma unroll
        for (int i = 0; i < kGroup; ++i) mma<1, 0>(sums[i], even.of[i]);
#pragma unroll
        for (int i = 0; i < kGroup; ++i) mma<1, 1>(sums[i], odd.of[i]);
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

extern "C" __global__ void MGLU_CLUSTERED __launch_bounds__(mglu::kThreads, mglu::kBlocksPerSm)
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
    const u32 ring = shared_address(shared) + warp * kRingBytes;
    const XRows x(shared_address(shared) + kWarps * kRingBytes, stages, p.tokens);
    // Warps of the last block with no row of their own still take part in the barriers.
    const int mine = first_row + tile * kRows < p.out_features ? (stages - part + kSplitK - 1) / kSplitK : 0;

    // The copy engine brings x with a tenth of the instructions, where there is one and it can.
    const bool by_engine = kCopyEngine && p.x_is_vectorizable;
    if (threadIdx.x < kXPieces) barrier_init(x.ready + 8 * threadIdx.x, 1);
    if constexpr (kCopyEngine) shared_is_written();
    if (by_engine) x.store(p, p.in_features / 8);  // the zeros
    if constexpr (kCluster > 1) arrive_in_cluster();
    __syncthreads();

    let_next_kernel_start();
    if constexpr (kDependentLaunch) {
        // Some of the first stage into L2. One lane's copies gain what all of them do, to 1%; after all of them, the next
        // kernel of a model starts 2.6 us later (benchmarks/NOTES.md). Kernels ahead may still write to W, which the copies
        // after the wait then find. By a loader of its own: one for both would keep its registers all along, of which 15 masks
        // have none.
        StageLoader<Stage, kSplitK> early(p, kReadOnce);
        early.start(p, tile_row, part);
        if (lane == 0) early.template load_next<true>(0);
    }
    wait_for_earlier_kernels();
    if constexpr (kCluster > 1) wait_for_cluster();
    if (by_engine)
        x.copy(p, warp, lane);
    else
        x.store(p, 0);
    StageLoader<Stage, kSplitK> loader(p, kReadOnce);
    loader.start(p, tile_row, part);
#pragma unroll
    for (int s = 0; s < kStages; ++s) {
        if (s < mine) loader.load_next(ring + s * kStageBytes);
        copy_async_commit();
    }
    if (!by_engine) {
        copy_async_commit();
        copy_async_wait<0>();
        __syncthreads();
        if (threadIdx.x < kXPieces) barrier_arrive(x.ready + 8 * threadIdx.x);
    }

    const Lane at(g, q, x, p.tokens);
    const PlaceConstants constants;
    Accumulators acc = {};
    u32 slot = ring;
    u32 ring_end = ring + kRingBytes;
    int x_offset = part * (kSub * 128);
    keep(ring_end);
    keep(x_offset);
    int x_end = 0;  // of the pieces that have come
    u32 x_next = x.ready;
    for (int n = 0; n < mine; ++n) {
        for (; x_offset >= x_end; x_end += x.piece_octets * 16, x_next += 8) barrier_wait(x_next, 0);
        copy_async_wait<kStages - 1>();  // the oldest stage has landed, for this lane's copies
        __syncwarp();                    // and for the other lanes'
#pragma unroll
        for (int sub = 0; sub < kSub; ++sub) {
            const Chunk chunk(slot + sub * (kRows * 128), at, x_offset + sub * 128);
#pragma unroll
            for (int group = 0; group < kGroups; ++group) {
                const MaskWords<kGroup> top = load_masks(slot, at, 0, sub, group);
                const MaskWords<kGroup> bottom = load_masks(slot, at, 1, sub, group);
                if (sub == kSub - 1 && group == kGroups - 1) {
                    // The stage now lives in registers: refill its slot before the arithmetic.
                    __syncwarp();
                    if (n + kStages < mine) loader.load_next(slot);
                    copy_async_commit();
                }
                if (group == 0) chunk.multiply_all(acc, constants);
                const Places<kGroup> even(top, bottom, 0, constants), odd(top, bottom, 1, constants);
                chunk.multiply_masked(acc, group, even, odd);
            }
        }
        slot += kStageBytes;
        if (slot == ring_end) slot -= kRingBytes;
        x_offset += kSplitK * (kSub * 128);
    }
    if constexpr (kCluster > 1) {
        // A block with no rows leaves, and its memory goes to another, only when what the other block sends has come.
        for (; x_next < x.ready + 8 * kXPieces; x_next += 8) barrier_wait(x_next, 0);
    }

    if constexpr (kSumsInRing)
        __syncwarp();
    else
        __syncthreads();
    store_partial(reinterpret_cast<float*>(shared + warp * kSumBytes), acc, g, q);
    __syncthreads();
    finish<Output>(p, shared, first_row);
}
