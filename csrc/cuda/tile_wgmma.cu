// MGLU for 9 tokens and more on Hopper: one read of W, masks and x serves all n_masks + 1 products. The page of this
// kernel is tile_wgmma.md.
//
// F_i is -1 where M_i = 1 and 1 elsewhere. With t = x W^T and f_i = x (F_i * W)^T, gate_i = (t - f_i) / 2 and value_i =
// (t + f_i) / 2. A block computes tiles of kBlockRows rows of W by kTokens tokens.
//
// The producer is one thread in a warpgroup of its own. It loads stages by TMA into a ring in shared memory:
// kStageChunks chunks of 64 columns of W, masks and x (tile_producer.cuh).
//
// A consumer warpgroup holds the sums of 64 rows and of its share of the masks in registers (tile_mainloop.cuh). It
// reads a chunk of its rows once, as wgmma's A operand. It multiplies the chunk with x (B): first the unchanged
// weights, and then for each mask the weights with the signs that the mask flips. To flip the signs of two weights
// costs a multiplication and one LOP3. While the tensor cores work on one mask, the signs for the next mask are flipped
// in a second set of registers.
//
// The epilogue (this file) computes and sums the terms in registers and writes only the result, and in training its
// partial derivatives (tile_training.cuh). If the sums of all masks would leave few tokens per tile, the kernel makes
// several passes over k.
//
// With kSparse, masks are the metadata of sparse MMAs, as in decode_mma.cu: s_i = x (M_i * W)^T needs no sign flips,
// and a chunk's fragments serve t and all masks. Three warps of the producer's warpgroup put a zero after each element
// of x. B then has twice the bytes, and wgmma reads at most 128 bytes of shared memory per clock. 32 tokens reach that
// limit, so sparse products serve few tokens.
//
// Blocks with the same rows and neighbouring tokens may form a cluster, in which they load W and masks for each other.
// This halves the reads from L2 and the power that the reads take. A slot of the ring is refilled when all warps of all
// blocks have released it.
//
// W in 8 or 4 bits is decoded to 16 bits in registers, once for all products of a pass. Scales of rows multiply the
// sums, and scales of groups of 128 columns multiply the weights.
//
// The sums of a token do not depend on other tokens: every accumulator sums k in ascending steps of 16.
//
// Requirements: x has 16-bit elements. in_features is a multiple of 8 (of 16 for 8-bit weights, of 32 for 4-bit
// weights). Rows of the weight, and of x unless it is permuted, are 16-byte aligned. Masks are contiguous inside a row.
// out_features >= kBlockRows, and in training out_features % 8 == 0.
#include "element.cuh"
#include "tile_producer.cuh"
#include "tile_mainloop.cuh"
#include "tile_fp8.cuh"
#include "tile_training.cuh"

namespace mglu {

__device__ __forceinline__ void load_4(float (&value)[4], const float4* from) {
    const float4 v = *from;
    value[0] = v.x, value[1] = v.y, value[2] = v.z, value[3] = v.w;
}

// Writes 16 rows of 8 tokens. A thread holds rows g and g + 8 of tokens 2q and 2q + 1.
__device__ __forceinline__ void store(const Params& p, const LaunchTile& tile, const float (&y)[4], int row, int owned,
                                      int token, int lane) {
    const auto pack = [](float low, float high) {
        return static_cast<u32>(from_float<kType>(low)) | static_cast<u32>(from_float<kType>(high)) << 16;
    };
    const auto transpose_pair = [lane](u32 pair) {
        const u32 rows = transpose(pair);  // rows 2 (lane % 4) and 2 (lane % 4) + 1 of the A operand
        if constexpr (!kSparse) return rows;
        // Rows of sparse MMAs are in the order of sparse_row().
        const u32 other = __shfl_xor_sync(~0u, rows, 2);
        return lane % 4 < 2 ? pick_bytes<0x5410>(rows, other) : pick_bytes<0x7632>(rows, other);
    };
    // Two neighbouring rows of one token, then the two rows 8 further.
    const u32 half[2] = {transpose_pair(pack(y[0], y[1])), transpose_pair(pack(y[2], y[3]))};
    token += lane / 4;
    if (token >= tile.end(p)) return;
    u16* out = static_cast<u16*>(p.out) + static_cast<i64>(tile.result_row(token)) * p.out_features;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int at = row + 8 * h + lane % 4 * 2;
        if (p.out_features % 2 == 0) {
            if (at >= owned) *reinterpret_cast<u32*>(out + at) = half[h];
        } else {
            if (at >= owned) out[at] = static_cast<u16>(half[h]);
            if (at + 1 >= owned) out[at + 1] = static_cast<u16>(half[h] >> 16);
        }
    }
}

// Shared memory for t and for the sum of terms so far. A warpgroup passes both on to the other warpgroup with the same
// rows, and from one pass to the next. Each thread exchanges with the same thread of the other warpgroup, or with
// itself in the next pass.
struct Exchange {
    float4* totals;   // t, unless a thread keeps it (kKeepTotal)
    float4* terms;    // the sum of terms so far
    float4* twice_p;  // in training, the sum so far of the terms of 2 P
    int written;      // named barrier: the first warpgroup has written all arrays
    int read;         // named barrier: the second one has read all arrays, and may have written the next pass's `terms`
};

constexpr int kExchangeStride = kColumns / 4 * 128;  // distance from one array to the next, in float4
constexpr int kKept = kKeepTotal ? kColumns : 1;

// Stands in for StoredBoxes outside training.
struct NoBoxes {};

// Runs one pass over k and then the epilogue of the pass's masks. kGroup is the index of this warpgroup among those
// that share 64 rows, and kWithTotal tells if the pass computes t. The last warpgroup writes the result in the last
// pass.
//
// - not_first: an earlier pass, of this tile or of an earlier tile, has used the exchange
// - more: another pass follows
// - kept_total: t, if kKeepTotal
template <int kGroup, bool kWithTotal, typename Boxes>
__device__ __forceinline__ void run_pass(const Params& p, u32 ring, u32 full, u32 empty, const Exchange& exchange,
                                         const LaunchTile& tile, int row_group, int pass, bool not_first, bool more,
                                         RingPosition& position, Boxes& boxes, float (&kept_total)[kKept]) {
    constexpr int kProducts = kPassMasks + (kWithTotal ? 1 : 0);
    constexpr bool kTotal = kGroup == 0 && kWithTotal;
    constexpr bool kLastGroup = kGroup == kMaskGroups - 1;
    constexpr int kFirst = first_product(kGroup, kProducts) - (kWithTotal && !kTotal ? 1 : 0);
    constexpr int kCount = first_product(kGroup + 1, kProducts) - first_product(kGroup, kProducts) - (kTotal ? 1 : 0);
    const int thread = threadIdx.x % 128;
    const int lane = thread % 32;
    const int warpgroup_row = min(row_group * 64, kBlockRows - 64);
    const int row = tile.row + warpgroup_row + thread / 32 * 16;
    const int owned = max(tile.owned, tile.row + row_group * 64);
    const bool done = kLastGroup && pass == kPasses - 1;
    Accumulators<kTotal, kFirst, kCount> accumulators;
    accumulators.clear();
    if constexpr (kFp8) accumulate_fp8(accumulators, p, ring, full, empty, tile, warpgroup_row, position);
    else if constexpr (kSparse)
        accumulators.accumulate_sparse(p, ring, full, empty, tile, warpgroup_row, pass, position);
    else if constexpr (kPermutedX)
        accumulators.template accumulate<typename decltype(accumulators)::PermutedColumns>(
            p, ring, full, empty, tile, warpgroup_row, pass, position);
    else
        accumulators.template accumulate<typename decltype(accumulators)::NaturalOrder>(p, ring, full, empty, tile,
                                                                                        warpgroup_row, pass, position);
    accumulators.scale_rows(p, row - tile.row + tile.scaled_row(p));
    if constexpr (kGroup > 0) named_sync<256>(exchange.written);
    else if (!kLastGroup && not_first) named_sync<256>(exchange.read);
    if constexpr (kTotal && kKeepTotal) {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) kept_total[c] = accumulators.t[c];
    }
#pragma unroll
    for (int j = 0; j < kColumns / 4; ++j) {
        const int token = tile.first_token() + 8 * j;
        const int first_mask = pass * kPassMasks + kFirst;
        float total[4], y[4] = {}, twice_p[4] = {};
        if constexpr (kTotal || kKeepTotal) {
#pragma unroll
            for (int r = 0; r < 4; ++r) total[r] = kKeepTotal ? kept_total[4 * j + r] : accumulators.t[4 * j + r];
        } else {
            load_4(total, exchange.totals + j * 128);
        }
        if (!kTotal || pass > 0) {
            load_4(y, exchange.terms + j * 128);
            if constexpr (kTrain) load_4(twice_p, exchange.twice_p + j * 128);
        }
        if constexpr (kTrain) {
            add_terms_and_derivatives(p, accumulators, total, j, token, first_mask, y, twice_p, boxes);
        } else {
#pragma unroll
            for (int r = 0; r < 4; ++r)
                y[r] = accumulators.add_terms(p, y[r], total[r], 4 * j + r,
                                              tile.row_of_weights(token + lane % 4 * 2 + r % 2), pass);
        }
        if (done) {
            if constexpr (kTrain) boxes.template put_results<kCount>(j, y, twice_p);
            else store(p, tile, y, row, owned, token, lane);
        } else {
            if constexpr (kTotal && !kKeepTotal)
                exchange.totals[j * 128] = make_float4(total[0], total[1], total[2], total[3]);
            exchange.terms[j * 128] = make_float4(y[0], y[1], y[2], y[3]);
            if constexpr (kTrain)
                exchange.twice_p[j * 128] = make_float4(twice_p[0], twice_p[1], twice_p[2], twice_p[3]);
        }
        if constexpr (kTrain)
            if (j % (kBoxTokens / 8) == kBoxTokens / 8 - 1)
                boxes.template store<kCount>(p, tile.row + warpgroup_row, token + 8 - kBoxTokens, tile.end(p),
                                             first_mask, done);
    }
    if constexpr (!kLastGroup) named_arrive<256>(exchange.written);
    else if (kGroup > 0 && more) named_arrive<256>(exchange.read);
}

template <int kGroup, typename Boxes>
__device__ __forceinline__ void consume(const Params& p, const Tiles& tiles, u32 ring, u32 full, u32 empty,
                                        float4* exchange_memory, int row_group, Boxes boxes) {
    float4* totals = exchange_memory + row_group * (kExchanged * kExchangeStride) + threadIdx.x % 128;
    float4* terms = kKeepTotal ? totals : totals + kExchangeStride;
    const Exchange exchange{totals, terms, terms + kExchangeStride, 1 + 2 * row_group, 2 + 2 * row_group};
    const int count = tiles.count(p);
    bool not_first = false;
    float kept_total[kKept];
    RingPosition position;
    for (int index = tiles.first(); index < count; index += tiles.step()) {
        const LaunchTile tile = tiles.at(p, index);
        const bool last = index + tiles.step() >= count;
        // Keep one loop with two branches. In two separate loops the two kinds of pass compile to wgmmas that wait for
        // each other (ptxas warning C7513).
#pragma unroll 1
        for (int pass = 0; pass < kPasses; ++pass) {
            const bool more = pass < kPasses - 1 || !last;
            if (kTotalInEachPass || pass == 0)
                run_pass<kGroup, true>(p, ring, full, empty, exchange, tile, row_group, pass, not_first, more, position,
                                       boxes, kept_total);
            else
                run_pass<kGroup, false>(p, ring, full, empty, exchange, tile, row_group, pass, not_first, more,
                                        position, boxes, kept_total);
            not_first = true;
        }
    }
    if constexpr (kTrain) boxes.finish();
}

// Returns the boxes of this warpgroup; `memory` has the boxes of all warpgroups. This function is a template, since
// only the parameters of training have maps of the results.
template <typename KernelParams>
__device__ __forceinline__ auto boxes_of(const KernelParams& tp, u32 memory) {
    if constexpr (!kTrain) return NoBoxes();
    else if constexpr (kExperts)
        return StoredBoxes({tp.out_map, tp.out_row_map}, {tp.partials_map, tp.partials_row_map}, memory);
    else return StoredBoxes({tp.out_map, tp.out_map}, {tp.partials_map, tp.partials_map}, memory);
}

}  // namespace mglu

extern "C" __global__ void MGLU_CLUSTER_DIMS __launch_bounds__(mglu::kThreads, 1)
    mglu_tile_wgmma(const __grid_constant__ mglu::LaunchParams tp MGLU_ITEM_PARAMS) {
    using namespace mglu;
    extern __shared__ __align__(1024) u8 shared[];
    const u32 ring = shared_address(shared);
    const u32 staging = ring + kStages * kStageBytes;
    float4* exchange_memory = reinterpret_cast<float4*>(shared + kStages * kStageBytes + kStagingBytes);
    // Each slot of the ring has three barriers. landed: the copies have arrived. full: x is expanded too; without an
    // expansion it is the same barrier as `landed`. empty: all consumers of all blocks of the cluster have released the
    // slot.
    const u32 landed = staging + kStagingBytes + kExchangeBytes;
    const u32 full = kSparse ? landed + 8 * kStages : landed;
    const u32 empty = full + 8 * kStages;
    if (threadIdx.x == 0) {
        for (int s = 0; s < kStages; ++s) {
            barrier_init(landed + 8 * s, 1);  // the producer thread
            if (kSparse) barrier_init(full + 8 * s, kExpandWarps);
            barrier_init(empty + 8 * s, 4 * kConsumers * kCluster);  // the consumer warps
        }
        fence_async_proxy();
    }
    if constexpr (kCluster > 1) arrive_in_cluster(), wait_for_cluster();
    __syncthreads();
    let_next_kernel_start();
#if MGLU_ITEMS
    // If a kernel copies x, this kernel starts after the copying kernel has waited for group_tokens, so the table is
    // complete.
    if constexpr (!kCopiedX) wait_for_earlier_kernels();
    const Tiles tiles = Tiles::create<kThreads>(items);
#else
    const Tiles tiles;
#endif

    const int warpgroup = threadIdx.x / 128;
    if (warpgroup == kConsumers) {
        if constexpr (kConsumers > 1) lower_register_limit<kProducerRegisters>();
        if (threadIdx.x % 128 == 0) produce(tp, tiles, ring, landed, empty);
        if constexpr (kSparse)
            if (threadIdx.x % 128 >= 32) expand_x(tp, tiles, ring, landed, full);
    } else {
        if constexpr (kConsumers > 1) raise_register_limit<kConsumerRegisters>();
        const int row_group = warpgroup / kMaskGroups;
        const u32 released = kCluster > 1 ? address_in_cluster(empty, threadIdx.x % kCluster) : empty;
        const auto boxes = boxes_of(tp, staging);
        if (warpgroup % kMaskGroups == 0)
            consume<0>(tp, tiles, ring, full, released, exchange_memory, row_group, boxes);
        else if constexpr (kMaskGroups == 2)
            consume<1>(tp, tiles, ring, full, released, exchange_memory, row_group, boxes);
#if MGLU_ITEMS
        tiles.clear_other_rows<128 * kConsumers>(tp, items.max_items);
#endif
    }
}
