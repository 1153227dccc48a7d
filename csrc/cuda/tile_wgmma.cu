// MGLU for 9 tokens and more on Hopper: W, the masks and x are read once for all n_masks + 1 products.
//
// With f_i = x (W, sign flipped where M_i = 1)^T and t = x W^T: gate_i = (t - f_i) / 2, value_i = (t + f_i) / 2.
// A block computes tiles of kBlockRows rows of W by kTokens tokens. One thread has the copy engine bring stages of 64 kSub
// columns of W, masks and x into a ring in shared memory. Each warpgroup holds the sums of 64 rows and of its share of the
// masks in registers: it reads 64 columns of its rows once, as wgmma's A operand, and multiplies them with the x tile (B)
// as they are and with the signs that each mask flips (a product and one LOP3 two weights). While the tensor cores work on
// one mask, the next mask's signs are flipped in a second set of registers. Activation, product, route weights and the sum
// over masks follow from registers; nothing but the result is written. Masks whose sums would leave few tokens a tile take
// several passes over k.
//
// The copy engine, because shared memory is what limits many tokens: B alone takes half its bandwidth, and copies by
// threads (cp.async) met bank conflicts that cost 10%. It is also why x is turned for many masks: with columns in their order
// the four threads of a row each read all its masks, for two bits of a byte; in that of permute_x.cu each reads a fourth.
//
// Blocks of the same rows and neighbouring tokens may be a cluster, whose blocks bring each other W and masks: half of what
// L2 would have to give, and to draw power for. A stage is filled by all of them once all warps of all are done with it.
//
// The sums of a token do not depend on the other tokens: k goes up in steps of 16 into one accumulator.
//
// With kSparse the masks are places of sparse products, as in decode_mma.cu: s_i = x (M_i * W)^T takes no flips, and a
// chunk's fragments serve t and all masks. x then has a zero after each element, so that B is twice as many bytes, which
// shared memory bears for few tokens only: 128 bytes a clock are what wgmma can read, and what N = 32 columns take. Three
// warps beside the copying thread put the zeros in.
//
// Needs: 16-bit elements, in_features % 8 == 0, rows of x (if not turned) and of weight 16-byte aligned, masks contiguous
// inside a row, out_features >= kBlockRows.
#include "element.cuh"
#include "tile_copy.cuh"
#include "tile_sums.cuh"

namespace mglu {

__device__ __forceinline__ void load_4(float (&value)[4], const float4* from) {
    const float4 v = *from;
    value[0] = v.x, value[1] = v.y, value[2] = v.z, value[3] = v.w;
}

// Writes 16 rows of 8 tokens: a thread brings rows g and g + 8 of tokens 2 q and 2 q + 1.
__device__ __forceinline__ void store(const Params& p, const float (&y)[4], int row, int owned, int token, int lane) {
    const auto pack = [](float low, float high) {
        return static_cast<u32>(from_float<kType>(low)) | static_cast<u32>(from_float<kType>(high)) << 16;
    };
    const auto turn = [lane](u32 pair) {
        const u32 rows = transpose(pair);  // 2 (lane % 4) and the next of A
        if constexpr (!kSparse) return rows;
        const u32 other = __shfl_xor_sync(~0u, rows, 2);
        return lane % 4 < 2 ? pick_bytes<0x5410>(rows, other) : pick_bytes<0x7632>(rows, other);
    };
    const u32 half[2] = {turn(pack(y[0], y[1])), turn(pack(y[2], y[3]))};  // rows 2 (lane % 4) and the next of one token
    token += lane / 4;
    if (token >= p.tokens) return;
    u16* out = static_cast<u16*>(p.out) + static_cast<i64>(token) * p.out_features;
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

// A warpgroup's place in the block, and what it needs to hand on. Each thread hands on to the same thread of the other
// warpgroup of its rows, and to itself.
struct Hands {
    float4* totals;  // t
    float4* terms;   // their sum so far
    int handed_on;   // named barriers of the two warpgroups: written by the first,
    int taken;       // and read by the second, which may have written `terms` for the next pass
};

// A pass of the warpgroup kGroup of those that share 64 rows, with t among its sums or not. It writes the result if it is
// the last. again: not the first pass of the first tile; more: another pass follows, of this tile or the next.
template <int kGroup, bool kWithTotal>
__device__ __forceinline__ void multiply_pass(const Params& p, u32 ring, u32 full, u32 empty, const Hands& hands,
                                              const Tile& tile, int row_group, int pass, bool again, bool more,
                                              Cursor& cursor) {
    constexpr int kSums = kPassMasks + (kWithTotal ? 1 : 0);
    constexpr bool kTotal = kGroup == 0 && kWithTotal;
    constexpr bool kLastGroup = kGroup == kMaskGroups - 1;
    constexpr int kFirst = share_start(kGroup, kSums) - (kWithTotal && !kTotal ? 1 : 0);
    constexpr int kCount = share_start(kGroup + 1, kSums) - share_start(kGroup, kSums) - (kTotal ? 1 : 0);
    const int thread = threadIdx.x % 128;
    const int lane = thread % 32;
    const int warpgroup_row = min(row_group * 64, kBlockRows - 64);
    const int row = tile.row + warpgroup_row + thread / 32 * 16;
    const int owned = max(tile.owned, tile.row + row_group * 64);
    const bool done = kLastGroup && pass == kPasses - 1;
    Sums<kTotal, kFirst, kCount> sums;
    sums.clear();
    if constexpr (kSparse)
        sums.add_sparse(p, ring, full, empty, tile.row, warpgroup_row, pass, cursor);
    else if constexpr (kTurned)
        sums.template add<typename decltype(sums)::Turned>(p, ring, full, empty, tile.row, warpgroup_row, pass, cursor);
    else
        sums.template add<typename decltype(sums)::InOrder>(p, ring, full, empty, tile.row, warpgroup_row, pass, cursor);
    if constexpr (kGroup > 0) named_sync<256>(hands.handed_on);
    else if (!kLastGroup && again) named_sync<256>(hands.taken);
#pragma unroll
    for (int j = 0; j < kColumns / 4; ++j) {
        const int token = tile.token + 8 * j;
        float total[4], y[4] = {};
        if constexpr (kTotal) {
#pragma unroll
            for (int r = 0; r < 4; ++r) total[r] = sums.t[4 * j + r];
        } else {
            load_4(total, hands.totals + j * 128);
        }
        if (!kTotal || pass > 0) load_4(y, hands.terms + j * 128);
#pragma unroll
        for (int r = 0; r < 4; ++r)
            y[r] = sums.add_terms(p, y[r], total[r], 4 * j + r, token + lane % 4 * 2 + r % 2, pass);
        if (done) {
            store(p, y, row, owned, token, lane);
        } else {
            if constexpr (kTotal) hands.totals[j * 128] = make_float4(total[0], total[1], total[2], total[3]);
            hands.terms[j * 128] = make_float4(y[0], y[1], y[2], y[3]);
        }
    }
    if constexpr (!kLastGroup) named_arrive<256>(hands.handed_on);
    else if (kGroup > 0 && more) named_arrive<256>(hands.taken);
}

template <int kGroup>
__device__ __forceinline__ void consume(const Params& p, u32 ring, u32 full, u32 empty, float4* exchange, int row_group) {
    float4* totals = exchange + row_group * (kColumns / 2 * 128) + threadIdx.x % 128;
    const Hands hands{totals, totals + kColumns / 4 * 128, 1 + 2 * row_group, 2 + 2 * row_group};
    const int tiles = tile_count(p);
    bool again = false;
    Cursor cursor;
    for (int index = first_tile(); index < tiles; index += tile_step()) {
        const Tile tile = tile_at(p, index);
        const bool last = index + tile_step() >= tiles;
        // One after the other instead of in a loop, the two kinds of pass compile to wgmmas that wait for each other.
#pragma unroll 1
        for (int pass = 0; pass < kPasses; ++pass) {
            const bool more = pass < kPasses - 1 || !last;
            if (kTotalEachPass || pass == 0)
                multiply_pass<kGroup, true>(p, ring, full, empty, hands, tile, row_group, pass, again, more, cursor);
            else
                multiply_pass<kGroup, false>(p, ring, full, empty, hands, tile, row_group, pass, again, more, cursor);
            again = true;
        }
    }
}

}  // namespace mglu

extern "C" __global__ void MGLU_CLUSTERED __launch_bounds__(mglu::kThreads, 1)
    mglu_tile_wgmma(const __grid_constant__ mglu::TileParams tp) {
    using namespace mglu;
    extern __shared__ __align__(1024) u8 shared[];
    const u32 ring = shared_address(shared);
    float4* exchange = reinterpret_cast<float4*>(shared + kStages * kStageBytes);
    // Of each stage: the copies have landed; all of it is there; all who multiply are done with it.
    const u32 landed = ring + kStages * kStageBytes + kExchangeBytes;
    const u32 full = kSparse ? landed + 8 * kStages : landed;
    const u32 empty = full + 8 * kStages;
    if (threadIdx.x == 0) {
        for (int s = 0; s < kStages; ++s) {
            barrier_init(landed + 8 * s, 1);  // the thread that copies
            if (kSparse) barrier_init(full + 8 * s, kSpreaders);
            barrier_init(empty + 8 * s, 4 * kConsumers * kCluster);  // the warps that multiply
        }
        shared_is_written();
    }
    if constexpr (kCluster > 1) arrive_in_cluster(), wait_for_cluster();
    __syncthreads();
    let_next_kernel_start();

    const int warpgroup = threadIdx.x / 128;
    if (warpgroup == kConsumers) {
        if constexpr (kConsumers > 1) give_registers<kCopyRegisters>();
        if (threadIdx.x % 128 == 0) produce(tp, ring, landed, empty);
        if constexpr (kSparse)
            if (threadIdx.x % 128 >= 32) spread_stages(tp.p, ring, landed, full);
    } else {
        if constexpr (kConsumers > 1) take_registers<kRegisters>();
        const int row_group = warpgroup / kMaskGroups;
        const u32 done = kCluster > 1 ? address_in_cluster(empty, threadIdx.x % kCluster) : empty;
        if (warpgroup % kMaskGroups == 0) consume<0>(tp.p, ring, full, done, exchange, row_group);
        else if constexpr (kMaskGroups == 2) consume<1>(tp.p, ring, full, done, exchange, row_group);
    }
}
