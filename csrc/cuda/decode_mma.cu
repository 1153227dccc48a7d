// MGLU for 1 to 16 tokens on sparse tensor cores, which apply the mask bits themselves. The page of this kernel is
// decode_mma.md.
//
// A sparse MMA takes two values of A for every four rows of B. For each value of A, two metadata bits select the row
// with which the value is multiplied. Here A holds W, which need not be sparse, and the four rows of B are (x_k, 0,
// x_l, 0), so that the metadata multiplies each weight with its x or with zero. s_i = x (M_i * W)^T then costs no
// instruction per weight: one LOP3 turns 16 mask bits into the metadata of 16 weights. For t = x W^T the metadata
// selects x for all weights. The gate is s_i, and the value is t - s_i.
//
// A warp owns 16 rows of W and every kSplitK-th stage of k. Its own lanes copy W and mask bytes with cp.async into a
// ring of kStages stages in shared memory. So loads need no registers and never wait for arithmetic, and no warp waits
// for another before the end. Each block copies all of its x once. With kCluster = 2, each of two neighbouring blocks
// copies half of the tokens to both blocks. For 16 x 64 weights a warp issues 4 (kMasks + 1) MMAs of 8 columns, so that
// 1 to 8 tokens cost the same. At the end each warp stores its sums in shared memory, and the block runs the epilogue
// (decode_epilogue.cuh).
//
// With MGLU_ITEMS, a block computes an item (work.cuh): a few rows of one expert, which may lie anywhere in x and in
// the result. Apart from that, the block runs as for a layer with that expert's weights.
//
// The order of summation depends on in_features and on the launch configuration, not on the other tokens.
//
// W in 8 or 4 bits is decoded to 16 bits when it is read from shared memory. Scales of rows are copied to shared memory
// at the start and multiply the rows' sums at the end. The scale of a block or group multiplies the sums of its 128
// columns.
//
// Requirements: in_features is a multiple of 8 (of 16 for 8-bit weights, of 32 for 4-bit weights), rows of the weight
// are 16-byte aligned, rows of masks are contiguous and aligned to MGLU_MASK_VECTOR, out_features >= 16.
#include "activation.cuh"
#include "decode_epilogue.cuh"
#include "element.cuh"
#include "mask_fragment.cuh"
#include "packed_masks.cuh"
#include "params.cuh"
#include "ptx.cuh"
#include "stage_ring.cuh"
#include "weight_format.cuh"
#include "work.cuh"

namespace mglu {

constexpr int kType = MGLU_ELEMENT;
constexpr int kMasks = MGLU_N_MASKS;
constexpr Activation kActivation = static_cast<Activation>(MGLU_ACTIVATION);
constexpr int kMaskWeightType = MGLU_MASK_WEIGHTS;  // -1: no mask weights
constexpr int kTiles = MGLU_TILES;                  // tiles of 16 rows in a block
constexpr int kSplitK = MGLU_SPLIT_K;               // warps that share a tile, each with every kSplitK-th stage
constexpr int kStages = MGLU_STAGES;                // stages in a warp's ring
constexpr int kStageChunks = MGLU_SUB;              // chunks of 64 columns in a stage
constexpr int kTokenTiles = MGLU_TOKEN_TILES;       // tiles of 8 tokens, the columns of an MMA
constexpr int kBlockTokens = MGLU_BLOCK_TOKENS;     // tokens of a block, at most 8 * kTokenTiles
constexpr int kTokenColumns = MGLU_TOKEN_COLUMNS;  // columns whose sums are kept: 1 for one token, else 8 * kTokenTiles
constexpr int kMaskVector = MGLU_MASK_VECTOR;      // bytes of masks that one cp.async copies
constexpr int kMaskGroup = MGLU_MASK_GROUP;        // masks whose bits are in registers at once; divides kMasks
constexpr int kBlocksPerSm = MGLU_BLOCKS_PER_SM;
constexpr bool kReadOnce = MGLU_READ_ONCE;  // a block has all tokens, so that W is read once
constexpr int kCluster = MGLU_CLUSTER;      // blocks that copy x for each other: 1 or 2
constexpr WeightFormat kFormat = static_cast<WeightFormat>(MGLU_WEIGHT_FORMAT);
using Weight = WeightPairs<kFormat, kType>;
// True if x and 8-bit W are read from shared memory with ldmatrix. fp8_block needs a second set of sums, for a group of
// columns, and then has enough registers for ldmatrix only with few masks.
constexpr bool kMatrices = kScalesRows<kFormat> || (kFormat == WeightFormat::fp8_block && kMasks <= 4);
constexpr int kGroups = kScalesColumns<kFormat> ? kStageChunks / 2 : 1;  // groups of columns in a stage
static_assert(!kScalesColumns<kFormat> || kStageChunks % 2 == 0, "groups of 128 columns");
static_assert(kCluster == 1 || (kReadOnce && kHasTma), "clusters need all tokens in each block, and TMA");

using Metadata = MetadataConstants<kMatrices>;
constexpr int kMaskGroups = kMasks / kMaskGroup;
static_assert(kMaskGroups * kMaskGroup == kMasks, "kMaskGroup divides kMasks");
constexpr int kWarps = kTiles * kSplitK;
constexpr int kThreads = 32 * kWarps;
constexpr int kRows = 16;
using Stage = StageShape<kRows, 8 * kStageChunks, Weight::kBits, kMasks, kMaskVector>;
constexpr int kWeightBytes = Stage::kWeightBytes;
constexpr int kMaskRowBytes = Stage::kMaskRowBytes;
constexpr int kStageBytes = Stage::kBytes;
constexpr bool kSwizzleMasks = Stage::kSwizzleMasks;
constexpr int kPartialFloats = (kMasks + 1) * kRows * kTokenColumns;
constexpr int kRingBytes = kStages * kStageBytes;
// After its last stage, each warp stores its sums in its own ring if they fit there. Otherwise the sums of all warps
// lie one after another. The sums then overwrite the rings and the x behind the rings, but not the barriers of x.
constexpr bool kSumsInRing = 4 * kPartialFloats <= kRingBytes;
constexpr int kSumBytes = kSumsInRing ? kRingBytes : (4 * kPartialFloats + 127) / 128 * 128;
constexpr int kScaleBytes = kScalesRows<kFormat> ? (4 * kTiles * kRows + 127) / 128 * 128 : 0;  // lie before the rings
using Epilogue = EpilogueShape<kType, kFormat, kMasks, kActivation, kMaskWeightType, kTiles, kSplitK, kRows,
                               kTokenColumns, kSumBytes, kMatrices>;

// With 4-bit weights and one token, arithmetic takes longer than loads. x is then stored in shared memory as the MMAs
// take it: for each half of a chunk first the even columns and then the odd ones, each element followed by a zero. A
// lane reads columns 2q (or 2q + 1) of four octets as one vector.
constexpr bool kExpandedX = kTokenColumns == 1 && Weight::kBits == 4;
constexpr int kChunkOfX = kExpandedX ? 256 : 128;  // bytes

// Loads and stores the expanded x. In this struct, `item` is the index of a vector: columns 2q and 2q + 1 of four
// octets.
struct ExpandedX {
    static constexpr int kHeld = 3;  // items of a thread that stay in registers while W is requested
    u32 held[kHeld][4];

    template <typename Rows>
    static __device__ __forceinline__ void load(u32 (&pair)[4], const Params& p, const Rows& rows, int item) {
        const u16* x = static_cast<const u16*>(p.x) + rows.x_row(0) * p.x_row_stride;
#pragma unroll
        for (int octet = 0; octet < 4; ++octet) {
            const int column = item / 4 * 32 + octet * 8 + item % 4 * 2;
            pair[octet] = 0;
            if (column >= p.in_features) continue;
            const u16* from = x + column * p.x_column_stride;
            pair[octet] = p.x_is_vectorizable ? *reinterpret_cast<const u32*>(from)
                                              : from[0] | static_cast<u32>(from[p.x_column_stride]) << 16;
        }
    }
    static __device__ __forceinline__ void store(const u32 (&pair)[4], u32 base, int item) {
        Vec16 even, odd;
#pragma unroll
        for (int octet = 0; octet < 4; ++octet)
            even.word[octet] = pair[octet] & 0xffffu, odd.word[octet] = pair[octet] >> 16;
        const u32 to = base + item / 4 * 128 + item % 4 * 16;
        store_shared_16(to, even);
        store_shared_16(to + 64, odd);
    }

    template <typename Rows>
    __device__ __forceinline__ void load(const Params& p, const Rows& rows, int items) {
#pragma unroll
        for (int i = 0; i < kHeld; ++i)
            if (threadIdx.x + i * kThreads < items) load(held[i], p, rows, threadIdx.x + i * kThreads);
    }
    // The caller synchronises the block afterwards.
    template <typename Rows>
    __device__ __forceinline__ void store(const Params& p, const Rows& rows, u32 base, int items) {
#pragma unroll
        for (int i = 0; i < kHeld; ++i)
            if (threadIdx.x + i * kThreads < items) store(held[i], base, threadIdx.x + i * kThreads);
        for (int item = threadIdx.x + kHeld * kThreads; item < items; item += kThreads) {
            load(held[0], p, rows, item);
            store(held[0], base, item);
        }
    }
};

// x in shared memory: a row for each token, in vectors of 8 columns. Rows are padded by 16 bytes, so that ldmatrix
// reads 8 tokens from different banks. x arrives in kXSegments segments along k, each with a barrier, so that
// arithmetic starts when the first segment has arrived.
constexpr int kXSegments = 4;

struct SharedX {
    u32 base;
    u32 ready;  // the segments' barriers
    int octets;
    int segment_octets;

    __device__ __forceinline__ SharedX(u32 base, int stages, int tokens)
        : base(base),
          octets(stages * kStageChunks * 8),
          segment_octets((stages + kXSegments - 1) / kXSegments * (kStageChunks * 8)) {
        constexpr u32 kSumsBeyondRings = kWarps * (kSumBytes - kRingBytes);
        ready = base + max(tokens * row_bytes(), kSumsBeyondRings);
    }

    __device__ __forceinline__ u32 row_bytes() const { return octets * 16 + 16; }

    // All threads of the block write vectors of 8 columns, from vector `first` on. The caller waits for the copies.
    template <typename Rows>
    __device__ __forceinline__ void store(const Params& p, const Rows& rows, int first) const {
        const u64 policy = cache_policy(false);
        for (int octet = first + threadIdx.x; octet < octets; octet += kThreads) {
            const bool within = octet * 8 < p.in_features;
            const u16* columns = static_cast<const u16*>(p.x) + octet * 8 * p.x_column_stride;
            const u16* x = columns;
            u32 destination = base + octet * 16;
            for (int token = 0; token < p.tokens; ++token, destination += row_bytes(), x += p.x_row_stride) {
                if (!Rows::kConsecutive && within) x = columns + rows.x_row(token) * p.x_row_stride;
                if (p.x_is_vectorizable && within) {
                    copy_async<16>(destination, x, 16, policy);
                    continue;
                }
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const u32 word =
                        within ? x[2 * j * p.x_column_stride] | x[(2 * j + 1) * p.x_column_stride] << 16 : 0;
                    asm volatile("st.shared.b32 [%0], %1;" ::"r"(destination + 4 * j), "r"(word) : "memory");
                }
            }
        }
    }

    // Writes x by bulk copies, but not the zeros past in_features. Lane s of warp w copies segment s of token w and of
    // every kWarps-th token after it. In a cluster, each block copies a share of the tokens to all blocks.
    template <typename Rows>
    __device__ __forceinline__ void copy(const Params& p, const Rows& rows, int warp, int lane) const {
        if (lane >= kXSegments) return;
        const int first = lane * segment_octets;
        const int bytes = max(0, min(segment_octets, p.in_features / 8 - first)) * 16;
        const u32 barrier = ready + 8 * lane;
        if (warp == 0) barrier_arrive_expect_bytes(barrier, bytes * p.tokens);
        const int rank = kCluster > 1 ? rank_in_cluster() : 0;
        for (int token = warp * kCluster + rank; bytes > 0 && token < p.tokens; token += kWarps * kCluster) {
            const u32 destination = base + token * row_bytes() + first * 16;
            const u16* x = static_cast<const u16*>(p.x) + rows.x_row(token) * p.x_row_stride + first * 8;
            if constexpr (kCluster > 1) bulk_copy_multicast<kCluster>(destination, x, bytes, barrier);
            else bulk_copy(destination, x, bytes, barrier);
        }
    }
};

// One warp's sums over k: [0] is t, [1 + i] is s_i.
struct Accumulators {
    float sum[kMasks + 1][kTokenTiles][4];

    // Adds the sums of a group of columns, multiplied by the scales of rows g and g + 8.
    __device__ __forceinline__ void add(const Accumulators& group, const float (&scale)[2]) {
#pragma unroll
        for (int i = 0; i <= kMasks; ++i)
#pragma unroll
            for (int n = 0; n < kTokenTiles; ++n)
#pragma unroll
                for (int j = 0; j < 4; ++j) sum[i][n][j] += group.sum[i][n][j] * scale[j / 2];
    }
};

// The scales of a stage for a lane's rows g and g + 8, one for each group of 128 columns.
struct GroupScales {
    float scale[kGroups][2];

    __device__ __forceinline__ void load(const Params& p, int row, int stage) {
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
            const int column = (stage * kGroups + group) * kScaledTogether;
#pragma unroll
            for (int half = 0; half < 2; ++half)
                scale[group][half] =
                    column < p.in_features ? StoredWeight<kFormat, kType>::scale(p, row + 8 * half, column) : 0.0f;
        }
    }
};

// The base addresses of a lane's reads; every other address is a base address plus a constant.
struct LaneAddresses {
    u32 weights;         // offset in a slot: 4 weights of row g, or the row that the lane passes to ldmatrix
    u32 masks[2];        // offsets in a slot: the masks of row g for columns 16q to 16q + 15 of a chunk
    u32 x[kTokenTiles];  // address of 4 of a token's first 16 bytes, or for ldmatrix 16 of its first 64 bytes

    __device__ __forceinline__ LaneAddresses(int lane, int g, int q, const SharedX& rows, int tokens) {
        if constexpr (kMatrices)  // matrices of rows 0 to 7 and 8 to 15, then of the same rows 16 columns further
            weights =
                lane % 16 * Stage::kBlockRowBytes + (lane / 16 ^ Stage::swizzle_of(lane % 8)) * Stage::kQuarterBytes;
        else
            weights = g * Stage::kBlockRowBytes + Stage::swizzle_of(g) * Stage::kQuarterBytes + q * (Weight::kBits / 2);
        // StageLoader swizzles the rows of the masks.
        const u32 swizzle = kSwizzleMasks ? g % 2 * 16 : 0;
#pragma unroll
        for (int i = 0; i < 2; ++i) masks[i] = kWeightBytes + g * kMaskRowBytes + ((2 * q + i) * kMasks ^ swizzle);
        // Columns of the MMA past the last token repeat that token. Their sums are never written.
#pragma unroll
        for (int n = 0; n < kTokenTiles; ++n)
            x[n] = rows.base + (kExpandedX  ? q * 16
                                : kMatrices ? min(n * 8 + lane % 8, tokens - 1) * rows.row_bytes() + lane / 8 * 16
                                            : min(n * 8 + g, tokens - 1) * rows.row_bytes() + q * 4);
        keep_in_register(weights), keep_in_register(masks[0]), keep_in_register(masks[1]);
#pragma unroll
        for (int n = 0; n < kTokenTiles; ++n) keep_in_register(x[n]);
    }
};

// Loads a lane's mask words of one mask group, for row g (half = 0) or g + 8 (half = 1).
__device__ __forceinline__ MaskWords<kMaskGroup> load_mask_group(u32 slot, const LaneAddresses& lane, int half,
                                                                 int chunk_in_stage, int group) {
    const u32 offset = half * (8 * kMaskRowBytes) + chunk_in_stage * mask_bytes(64, kMasks) + group * kMaskGroup;
    if constexpr (kMaskGroup == kMasks && !kSwizzleMasks) {
        return load_mask_words<kMaskGroup>(slot + lane.masks[0] + offset);
    } else {
        constexpr int kWords = kMaskGroup / 4 > 0 ? kMaskGroup / 4 : 1;
        static_assert(
            (kMaskGroup == kMasks && !kSwizzleMasks) || kMaskGroup == 4 || kMaskGroup == 8 || kMaskGroup == 16,
            "the masks of a group are whole words");
        u32 a[kWords], b[kWords];
        load_shared_words(a, slot + lane.masks[0] + offset);
        load_shared_words(b, slot + lane.masks[1] + offset);
        MaskWords<kMaskGroup> masks;
#pragma unroll
        for (int w = 0; w < kMaskGroup / 4; ++w) {
            masks.word[2 * w] = pick_bytes<0x5410>(a[w], b[w]);
            masks.word[2 * w + 1] = pick_bytes<0x7632>(a[w], b[w]);
        }
        return masks;
    }
}

// A lane's fragments of one chunk (16 rows by 64 columns): A and B of four sparse MMAs. Of every 8 columns the lane
// holds x in columns 2q and 2q + 1.
struct ChunkFragments {
    SparseWeights weights[2];  // the even weights and the odd weights
    // [token tile][half][odd][8 columns of the half]. The upper 16 bits of each word are 0. With kMatrices the lower 16
    // bits are 0 instead, which takes fewer instructions of the pipe that also decodes W.
    u32 x[kTokenTiles][2][2][4];

    __device__ __forceinline__ ChunkFragments(u32 rows, const LaneAddresses& lane, int x_offset) {
#pragma unroll
        for (int source = 0; source < 4; source += kMatrices ? 2 : 1) {
            const u32 address = (rows + lane.weights) ^ source * Stage::kQuarterBytes;
            if constexpr (kMatrices) {
                u32 word[4];
                load_matrices(word, address);
#pragma unroll
                for (int i = 0; i < 4; ++i) divide(source + i / 2, i % 2, {word[i]});
            } else {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    u32 word[Weight::kWords];
                    Weight::load(word, address + half * (8 * Stage::kBlockRowBytes));
                    divide(source, half, word);
                }
            }
        }
        if constexpr (kExpandedX) {
#pragma unroll
            for (int i = 0; i < 4; ++i) load_shared_words(x[0][i / 2][i % 2], lane.x[0] + x_offset + i * 64);
        } else {
#pragma unroll
            for (int n = 0; n < kTokenTiles; ++n)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    u32 word[4];
                    if constexpr (kMatrices) load_matrices(word, lane.x[n] + x_offset + half * 64);
#pragma unroll
                    for (int octet = 0; octet < 4; ++octet) {
                        if constexpr (!kMatrices)
                            word[octet] = load_shared_4(lane.x[n] + x_offset + half * 64 + octet * 16);
                        x[n][half][0][octet] = kMatrices ? word[octet] << 16 : word[octet] & 0xffffu;
                        x[n][half][1][octet] = kMatrices ? word[octet] & 0xffff0000u : word[octet] >> 16;
                    }
                }
        }
    }

    __device__ __forceinline__ void divide(int source, int half, const u32 (&word)[Weight::kWords]) {
        Weight::divide(weights[0].pair(source, half), weights[1].pair(source, half), word);
    }

    template <int kSelector, int kOdd>
    __device__ __forceinline__ void mma(float (&sum)[kTokenTiles][4], u32 metadata) const {
#pragma unroll
        for (int n = 0; n < kTokenTiles; ++n)
            mma_sparse_16x8x32<kType == kBfloat16, kSelector>(sum[n], weights[kOdd].value[kSelector],
                                                              x[n][kSelector][kOdd], metadata);
    }

    // Adds the products of all weights to t, with metadata that selects all.
    __device__ __forceinline__ void multiply_unmasked(Accumulators& acc, const Metadata& constants) const {
        mma<0, 0>(acc.sum[0], constants.select_all);
        mma<0, 1>(acc.sum[0], constants.select_all);
        mma<1, 0>(acc.sum[0], constants.select_all);
        mma<1, 1>(acc.sum[0], constants.select_all);
    }

    // Adds the products that each mask of a group keeps to the mask's s_i. The loops over masks are innermost, so that
    // consecutive MMAs have different accumulators.
    __device__ __forceinline__ void multiply_masked(Accumulators& acc, int group,
                                                    const SparseMetadata<kMaskGroup>& even,
                                                    const SparseMetadata<kMaskGroup>& odd) const {
        float (*sums)[kTokenTiles][4] = acc.sum + 1 + group * kMaskGroup;
#pragma unroll
        for (int i = 0; i < kMaskGroup; ++i) mma<0, 0>(sums[i], even.word[i]);
#pragma unroll
        for (int i = 0; i < kMaskGroup; ++i) mma<0, 1>(sums[i], odd.word[i]);
#pragma unroll
        for (int i = 0; i < kMaskGroup; ++i) mma<1, 0>(sums[i], even.word[i]);
#pragma unroll
        for (int i = 0; i < kMaskGroup; ++i) mma<1, 1>(sums[i], odd.word[i]);
    }
};

// Stores a warp's sums in shared memory, in the layout that the epilogue reads.
__device__ __forceinline__ void store_partial(float* partial, const Accumulators& acc, int g, int q) {
#pragma unroll
    for (int i = 0; i <= kMasks; ++i) {
        float* sums = partial + i * (kRows * kTokenColumns);
        if constexpr (kTokenColumns == 1) {
            if (q == 0) {
                sums[g] = acc.sum[i][0][0];
                sums[g + 8] = acc.sum[i][0][2];
            }
        } else {
#pragma unroll
            for (int n = 0; n < kTokenTiles; ++n)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const float first = acc.sum[i][n][2 * half], second = acc.sum[i][n][2 * half + 1];
                    const int token = n * 8 + 2 * q, row = g + half * 8;
                    if constexpr (Epilogue::kRowsFirst) {
                        sums[Epilogue::index_of_sum(token, row)] = first;
                        sums[Epilogue::index_of_sum(token + 1, row)] = second;
                    } else {
                        *reinterpret_cast<float2*>(sums + Epilogue::index_of_sum(token, row)) =
                            make_float2(first, second);
                    }
                }
        }
    }
}

// Narrows the parameters to the tokens of a block, up to kBlockTokens from first_token on.
__device__ __forceinline__ Params select_tokens(Params p, int first_token) {
    p.x = static_cast<const u16*>(p.x) + first_token * p.x_row_stride;
    p.out = static_cast<u16*>(p.out) + static_cast<i64>(first_token) * p.out_features;
    if constexpr (kMaskWeightType >= 0)
        p.mask_weights = static_cast<const typename Element<kMaskWeightType>::Bits*>(p.mask_weights) +
                         first_token * p.mask_weight_row_stride;
    p.tokens = min(p.tokens - first_token, kBlockTokens);
    return p;
}

}  // namespace mglu

extern "C" __global__ void MGLU_CLUSTER_DIMS __launch_bounds__(mglu::kThreads, mglu::kBlocksPerSm)
    mglu_decode_mma(const __grid_constant__ mglu::Params all MGLU_ITEM_PARAMS) {
    using namespace mglu;
#if MGLU_ITEMS
    let_next_kernel_start();
    wait_for_earlier_kernels();
    __shared__ int rows_of_item[kBlockTokens];
    const int row_blocks = (all.out_features + kTiles * kRows * kCluster - 1) / (kTiles * kRows * kCluster) * kCluster;
    const Item item = item_of_block<kBlockTokens, kCluster>(items, row_blocks, rows_of_item);
    if (item.count == 0) return;
    const RowsOfItem rows{rows_of_item, items.top_k};
    const int first_row = item.row_block * kTiles * kRows;
    if (item.expert < 0) {
        __syncthreads();
        return store_zeros<kTiles * kRows, u16>(all, rows, item.count, first_row);
    }
    const Params p = narrow_to_item(all, items, item);
#else
    const Work<int> work = work_of_neighbours<kTiles * kRows, kBlockTokens>(all);
    const Params p = select_tokens(all, work.token);
    const RowsInOrder rows;
    const int first_row = work.row;
#endif
    extern __shared__ __align__(128) u8 shared[];
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int tile = warp / kSplitK;
    const int part = warp % kSplitK;
    const int g = lane / 4;
    const int q = lane % 4;
    // A last tile that would run past the end starts at an earlier row instead, and computes some rows twice.
    const int tile_row = min(first_row + tile * kRows, p.out_features - kRows);
    const int chunks = (p.in_features + 63) / 64;
    const int stages = (chunks + kStageChunks - 1) / kStageChunks;
    const u32 rings = shared_address(shared) + kScaleBytes;
    const u32 ring = rings + warp * kRingBytes;
    const SharedX x(rings + kWarps * kRingBytes, stages, p.tokens);
    // A warp of the last block may have no rows, but it still takes part in the barriers.
    const int own_stages = first_row + tile * kRows < p.out_features ? (stages - part + kSplitK - 1) / kSplitK : 0;

#if MGLU_ITEMS
    if (kItems == Items::found && own_stages > 0) {  // prefetch the first stage before anything else is read
        StageLoader<Stage, kSplitK> early(p, kReadOnce);
        early.start(p, tile_row, part);
        early.template load_next<true>(0);
    }
#endif

    // Bulk copies take a tenth of the instructions of cp.async.
    const bool use_bulk_copy = kHasTma && !kExpandedX && p.x_is_vectorizable;
    // The expanded x needs no barriers, and occupies their memory.
    if (!kExpandedX && threadIdx.x < kXSegments) barrier_init(x.ready + 8 * threadIdx.x, 1);
    if constexpr (kHasTma) fence_async_proxy();
    if (use_bulk_copy) x.store(p, rows, p.in_features / 8);  // writes only the zeros past in_features
    if constexpr (kCluster > 1) arrive_in_cluster();
    __syncthreads();

    if constexpr (kItems == Items::none) {
        let_next_kernel_start();
        if constexpr (kHasDependentLaunch) {
            // Prefetch one lane's share of the first stage into L2 before the wait. Earlier kernels may still write to
            // W, but the copies after the wait see what they wrote. Prefetching the whole stage would gain less than
            // 1% more, and delay the other kernels of a model (decode_mma.md). The prefetch has a loader of its own,
            // because a shared one would occupy registers across the wait, and 15 masks leave none to spare.
            StageLoader<Stage, kSplitK> early(p, kReadOnce);
            early.start(p, tile_row, part);
            if (lane == 0) early.template load_next<true>(0);
        }
        wait_for_earlier_kernels();
    }
    if constexpr (kScalesRows<kFormat>)
        for (int row = threadIdx.x; row < kTiles * kRows; row += kThreads)
            copy_async<4>(shared_address(shared) + 4 * row,
                          static_cast<const float*>(p.weight_scale) + min(first_row + row, p.out_features - 1), 4,
                          cache_policy(false));
    if constexpr (kCluster > 1) wait_for_cluster();
    ExpandedX expanded;
    const int x_items = x.octets;
    if constexpr (kExpandedX) expanded.load(p, rows, x_items);
    else if (use_bulk_copy) x.copy(p, rows, warp, lane);
    else x.store(p, rows, 0);
    StageLoader<Stage, kSplitK> loader(p, kReadOnce);
    loader.start(p, tile_row, part);
#pragma unroll
    for (int s = 0; s < kStages; ++s) {
        if (s < own_stages) loader.load_next(ring + s * kStageBytes);
        copy_async_commit();
    }
    if constexpr (kExpandedX) {
        expanded.store(p, rows, x.base, x_items);
        __syncthreads();
    } else if (!use_bulk_copy) {
        copy_async_commit();
        copy_async_wait<0>();
        __syncthreads();
        if (threadIdx.x < kXSegments) barrier_arrive(x.ready + 8 * threadIdx.x);
    }

    const LaneAddresses at(lane, g, q, x, p.tokens);
    const Metadata constants;
    Accumulators acc = {};
    u32 slot = ring;
    u32 ring_end = ring + kRingBytes;
    int x_offset = part * (kStageChunks * kChunkOfX);
    keep_in_register(ring_end);
    keep_in_register(x_offset);
    int x_end = 0;  // end of the segments of x that have arrived
    u32 x_next = x.ready;
    GroupScales scales, next_scales;
    if (kScalesColumns<kFormat> && own_stages > 0) next_scales.load(p, tile_row + g, part);
    for (int n = 0; n < own_stages; ++n) {
        if constexpr (!kExpandedX)
            for (; x_offset >= x_end; x_end += x.segment_octets * 16, x_next += 8) barrier_wait(x_next, 0);
        if constexpr (kScalesColumns<kFormat>) {  // load scales a stage ahead, so that nothing waits for them
            scales = next_scales;
            if (n + 1 < own_stages) next_scales.load(p, tile_row + g, part + (n + 1) * kSplitK);
        }
        copy_async_wait<kStages - 1>();  // this lane's copies of the oldest stage have arrived
        __syncwarp();                    // all lanes' copies have arrived
        Accumulators group_sums;
#pragma unroll
        for (int chunk_in_stage = 0; chunk_in_stage < kStageChunks; ++chunk_in_stage) {
            if (kScalesColumns<kFormat> && chunk_in_stage % 2 == 0) group_sums = {};
            Accumulators& sums = kScalesColumns<kFormat> ? group_sums : acc;
            const ChunkFragments chunk(slot + chunk_in_stage * (kRows * Stage::kBlockRowBytes), at,
                                       x_offset + chunk_in_stage * kChunkOfX);
#pragma unroll
            for (int group = 0; group < kMaskGroups; ++group) {
                const MaskWords<kMaskGroup> top = load_mask_group(slot, at, 0, chunk_in_stage, group);
                const MaskWords<kMaskGroup> bottom = load_mask_group(slot, at, 1, chunk_in_stage, group);
                if (chunk_in_stage == kStageChunks - 1 && group == kMaskGroups - 1) {
                    // The whole stage is in registers now. Refill its slot before the arithmetic.
                    __syncwarp();
                    if (n + kStages < own_stages) loader.load_next(slot);
                    copy_async_commit();
                }
                if (group == 0) chunk.multiply_unmasked(sums, constants);
                const SparseMetadata<kMaskGroup> even(top, bottom, 0, constants), odd(top, bottom, 1, constants);
                chunk.multiply_masked(sums, group, even, odd);
            }
            if (kScalesColumns<kFormat> && chunk_in_stage % 2 == 1)
                acc.add(group_sums, scales.scale[chunk_in_stage / 2]);
        }
        slot += kStageBytes;
        if (slot == ring_end) slot -= kRingBytes;
        x_offset += kSplitK * (kStageChunks * kChunkOfX);
    }
    if constexpr (kCluster > 1) {
        // The other block of the cluster copies x to this block even if this block has no rows left to compute. This
        // block must not exit, which would free its shared memory, before those copies have arrived.
        for (; x_next < x.ready + 8 * kXSegments; x_next += 8) barrier_wait(x_next, 0);
    }

    if constexpr (kScalesRows<kFormat>) copy_async_wait<0>();  // warps without rows have not yet waited for the scales
    if constexpr (kSumsInRing) __syncwarp();
    else __syncthreads();
    u8* sums = shared + kScaleBytes;
    store_partial(reinterpret_cast<float*>(sums + warp * kSumBytes), acc, g, q);
    __syncthreads();
    decode_epilogue<Epilogue>(p, rows, reinterpret_cast<const float*>(shared), sums, first_row);
}
