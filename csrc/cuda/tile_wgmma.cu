// MGLU for 9 tokens and more on Hopper: W, the masks and x are read once for all n_masks + 1 products.
//
// With f_i = x (W, sign flipped where M_i = 1)^T and t = x W^T: gate_i = (t - f_i) / 2, value_i = (t + f_i) / 2.
// A block computes tiles of kBlockRows rows of W by kTokens tokens. One warpgroup copies stages of 64 kSub columns of W,
// masks and x into a ring in shared memory. Each other warpgroup holds the sums of 64 rows and of its share of the masks
// in registers: it reads 64 columns of its rows once, as wgmma's A operand, and multiplies them with the x tile (B) as
// they are and with the signs that each mask flips (a product and one LOP3 two weights). While the tensor cores work on
// one mask, the next mask's signs are flipped in a second set of registers. Activation, product, route weights and the
// sum over masks follow from registers; nothing but the result is written.
//
// The sums of a token do not depend on the other tokens: k goes up in steps of 16 into one accumulator.
//
// Needs: 16-bit elements, in_features % 8 == 0, weight rows 16-byte aligned, mask rows aligned to MGLU_MASK_VECTOR,
// masks contiguous inside a row, out_features >= kBlockRows; p.x is what turn_x.cu made of x, launched just before.
#include "activation.cuh"
#include "element.cuh"
#include "finish.cuh"
#include "mask_fragment.cuh"
#include "params.cuh"
#include "ptx.cuh"
#include "stage_ring.cuh"
#include "wgmma.cuh"

namespace mglu {

constexpr int kType = MGLU_ELEMENT;
constexpr int kMasks = MGLU_N_MASKS;
constexpr int kActivation = MGLU_ACTIVATION;
constexpr int kRouteType = MGLU_ROUTE;             // -1: no route weights
constexpr int kTokens = MGLU_TOKEN_COLUMNS;        // tokens of a tile: N of the wgmma
constexpr int kBlockRows = MGLU_BLOCK_ROWS;        // rows of W of a tile, a multiple of 16
constexpr int kMaskGroups = MGLU_MASK_GROUPS;      // warpgroups that share 64 rows, each with its part of the masks
constexpr int kStages = MGLU_STAGES;               // depth of the ring
constexpr int kSub = MGLU_SUB;                     // 64-wide chunks of k a stage
constexpr int kSteps = MGLU_STEPS;                 // wgmmas of 16 columns issued together: 1, 2 or 4
constexpr int kMaskVector = MGLU_MASK_VECTOR;      // bytes copied of the masks at a time

constexpr int kRowGroups = (kBlockRows + 63) / 64;
constexpr int kConsumers = kRowGroups * kMaskGroups;
constexpr int kThreads = 128 * (kConsumers + 1);
constexpr int kColumns = kTokens / 2;  // sums of one product in a thread
constexpr int kSwath = 8;              // tiles of rows that are walked together along the tokens
static_assert(kBlockRows % 16 == 0 && kBlockRows >= 64, "whole warps of rows, and one warpgroup at least");
static_assert(kMaskGroups == 1 || kMaskGroups == 2, "one warpgroup for all masks, or two");

// A stage: x [kSub][kTokens][64] (swizzled for wgmma), W [kSub][kBlockRows][64] (odd rows exchange neighbouring 16-byte
// vectors, so that a fragment's two rows lie in different banks), masks [kBlockRows][8 kSub kMasks].
constexpr int kXBytes = kSub * kTokens * 128;
constexpr int kWeightBytes = kSub * kBlockRows * 128;
constexpr int kMaskRowBytes = 8 * kSub * kMasks;
constexpr int kStageBytes = (kXBytes + kWeightBytes + kBlockRows * kMaskRowBytes + 1023) / 1024 * 1024;
constexpr bool kSwizzleMasks = kMasks == 16 && kMaskVector == 16;

// The n_masks + 1 sums (t, then one a mask) are dealt out to the warpgroups of the same rows.
__host__ __device__ constexpr int share_start(int group) {
    const int longer = (kMasks + 1) % kMaskGroups;  // as many shares are one sum longer, the first ones
    return group * ((kMasks + 1) / kMaskGroups) + (group < longer ? group : longer);
}

// Behind the ring: what the first warpgroup of 64 rows hands on to the second (t, and its terms), then the barriers.
constexpr int kExchangeBytes = kMaskGroups == 1 ? 0 : kRowGroups * kColumns * 1024;

struct Tile {
    int row;    // where the block's rows start: higher than `owned` where they would run over the end
    int owned;  // rows from here on are this tile's to write
    int token;
};

// Swaths of rows, in each the tokens, so that blocks at work at the same time share W and x in L2.
__device__ __forceinline__ Tile tile_at(const Params& p, int index) {
    const int row_tiles = (p.out_features + kBlockRows - 1) / kBlockRows;
    const int token_tiles = (p.tokens + kTokens - 1) / kTokens;
    const int swath = index / (kSwath * token_tiles);
    const int inside = index - swath * (kSwath * token_tiles);
    const int height = min(kSwath, row_tiles - swath * kSwath);
    const int owned = (swath * kSwath + inside % height) * kBlockRows;
    return {min(owned, p.out_features - kBlockRows), owned, inside / height * kTokens};
}

__device__ __forceinline__ int tile_count(const Params& p) {
    return (p.out_features + kBlockRows - 1) / kBlockRows * ((p.tokens + kTokens - 1) / kTokens);
}

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

// --- the copying warpgroup ---

__device__ __forceinline__ void produce(const Params& p, u32 ring, u32 full, u32 empty) {
    constexpr int kVectors = 8 * kSub;  // 16-byte vectors of a row of W in a stage
    constexpr int kRowStep = 128 / kVectors;
    constexpr int kMaskVectors = kMaskRowBytes / kMaskVector;
    constexpr int kMaskRowStep = 128 / kMaskVectors;
    const int thread = threadIdx.x % 128;
    const int column = thread % kVectors;
    const int row = thread / kVectors;
    const int mask_column = thread % kMaskVectors * kMaskVector;
    const int mask_row = thread / kMaskVectors;
    const int stages = stage_count(p);
    // Where this thread copies to in the current slot. A slot's address by itself would be uniform over the warp, and
    // ptxas 13.0 lets a uniform address overwrite the copies' cache policy.
    const u32 first_weight = ring + kXBytes + column / 8 * (kBlockRows * 128) + row * 128 + (column % 8 ^ (row & 1)) * 16;
    const u32 to_masks = ring + kXBytes + kWeightBytes + mask_row * kMaskRowBytes +
                         (kSwizzleMasks ? mask_column ^ (mask_row & 1) * 16 : mask_column) - first_weight;
    const u64 policy = cache_policy(p.tokens <= kTokens);
    u32 to_weight = first_weight;
    Cursor cursor;
    bool first = true;
    for (int index = blockIdx.x; index < tile_count(p); index += gridDim.x) {
        const Tile tile = tile_at(p, index);
        const u8* weight = static_cast<const u8*>(p.weight) + (tile.row + row) * p.weight_row_stride * 2 + column * 16;
        const u8* masks = p.masks + (tile.row + mask_row) * p.mask_row_stride + mask_column;
        const u8* x = static_cast<const u8*>(p.x) + static_cast<i64>(tile.token / kTokens) * stages * kXBytes;
        for (int stage = 0; stage < stages; ++stage) {
            const u32 landed = full + 8 * cursor.slot;
            const int octets_left = p.in_features / 8 - stage * kVectors;
            barrier_wait(empty + 8 * cursor.slot, cursor.parity ^ 1);
            // Weights past the row's end become zeros. Mask bits there flip zeros: they may be anything.
            const u8* from = weight;
#pragma unroll
            for (int r = 0; r < kBlockRows; r += kRowStep) {
                copy_async<16>(to_weight + r * 128, from, column < octets_left ? 16 : 0, policy);
                from += p.weight_row_stride * (2 * kRowStep);
                keep(from);
            }
            from = masks;
            if ((128 % kMaskVectors == 0 || mask_row < kMaskRowStep) && mask_column < octets_left * kMasks) {
#pragma unroll
                for (int r = 0; r < kBlockRows; r += kMaskRowStep) {
                    if (kBlockRows % kMaskRowStep == 0 || r + mask_row < kBlockRows)
                        copy_async<kMaskVector>(to_weight + to_masks + r * kMaskRowBytes, from, kMaskVector, policy);
                    from += p.mask_row_stride * kMaskRowStep;
                    keep(from);
                }
            }
            copy_async_arrive(landed);
            if (thread == 0) {
                if (first) wait_for_earlier_kernels();  // for x only: turn_x has waited for all before itself
                barrier_expect(landed, kXBytes);
                copy_bulk(ring + cursor.slot * kStageBytes, x, kXBytes, landed);
            }
            first = false;
            cursor.advance();
            to_weight = cursor.slot == 0 ? first_weight : to_weight + kStageBytes;
            weight += kVectors * 16;
            masks += kMaskRowBytes;
            x += kXBytes;
        }
    }
}

// --- the multiplying warpgroups ---

// The mask words of one lane for kCount masks from kFirst on, of the 2 kMasks bytes of its two octets (column: in bytes).
// All masks are read, in wide pieces, whichever are wanted: eight lanes then read neighbours, where narrow pieces of rows
// 64 or 128 bytes apart would meet in one bank.
template <int kFirst, int kCount>
__device__ __forceinline__ MaskWords<kCount> load_share(u32 row, u32 column, int row_parity) {
    MaskWords<kMasks> all;
    if constexpr (kSwizzleMasks) {
        const Vec16 a = load_shared_16(row + (column ^ row_parity * 16));
        const Vec16 b = load_shared_16(row + ((column + 16) ^ row_parity * 16));
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            all.word[2 * w] = pick_bytes<0x5410>(a.word[w], b.word[w]);
            all.word[2 * w + 1] = pick_bytes<0x7632>(a.word[w], b.word[w]);
        }
    } else {
        all = load_mask_words<kMasks>(row + column);
    }
    MaskWords<kCount> masks;
#pragma unroll
    for (int w = 0; w < MaskWords<kCount>::kWords; ++w) {
        const int i = kFirst + 2 * w;  // an odd start takes its two masks from two words
        const int next = i / 2 + 1 < MaskWords<kMasks>::kWords ? i / 2 + 1 : i / 2;
        masks.word[w] = i % 2 == 0 ? all.word[i / 2] : pick_bytes<0x6341>(all.word[i / 2], all.word[next]);
    }
    return masks;
}

// The sums of 64 rows for t, if kTotal, and for the masks from kFirst to kFirst + kCount - 1.
template <bool kTotal, int kFirst, int kCount>
struct Sums {
    float t[kTotal ? kColumns : 1];
    float f[kCount > 0 ? kCount : 1][kColumns];

    static constexpr int kParts = 4 / kSteps;  // of a chunk
    static constexpr int kProducts = kCount + (kTotal ? 1 : 0);
    static constexpr int kGroups = kParts * kProducts;  // of wgmmas in a chunk, in order: by part, t before the masks
    // Flipped fragments take turns in two sets of registers, so that one group runs while the next is prepared. t's, the
    // weights as they are, serve the masks of their part too: one set, or two where t is all there is.
    static constexpr int kPlainSets = kCount == 0 ? 2 : 1;
    static constexpr bool kRoomy = kProducts * kColumns <= 96;  // registers for loads ahead of the wait
    static_assert(kGroups * kSub >= 2, "a stage is given back during the next");
    static_assert(kCount > 0 || kParts % 2 == 0, "two sets take turns");

    // How many groups may still run when the fragments of this one are written: one, unless it is the one just before
    // that had the same set of registers (an odd number of masks in a chunk, and no t between them).
    __device__ __forceinline__ static constexpr int pending(int group) {
        return group == 0 && !kTotal && kParts * kCount % 2 == 1 ? 0 : 1;
    }

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
            if constexpr (kTotal) t[c] = 0.0f;
#pragma unroll
            for (int i = 0; i < kCount; ++i) f[i][c] = 0.0f;
        }
    }

    __device__ __forceinline__ static void multiply(float (&sums)[kColumns], const u32 (&a)[kSteps][4], u64 b) {
        // Written here and nowhere later: else ptxas fences again, or lets the groups wait for each other.
#pragma unroll
        for (int s = 0; s < kSteps; ++s) asm volatile("" ::"r"(a[s][0]), "r"(a[s][1]), "r"(a[s][2]), "r"(a[s][3]));
        wgmma_fence();
#pragma unroll
        for (int s = 0; s < kSteps; ++s) Wgmma<kTokens, kType == kBfloat16>::run(sums, a[s], b + 2 * s);
        wgmma_commit();
    }

    // The fragments of one row (of rows g and g + 8) in a part of a chunk: pairs (A_j, B_j) of its octets A and B.
    __device__ __forceinline__ static void pair_up(u32 (&weight)[kSteps][4], const Vec16 (&octet)[2], int half, int part) {
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
            const u32 a = octet[0].word[part * kSteps + s];
            const u32 b = octet[1].word[part * kSteps + s];
            weight[s][half] = pick_bytes<0x5410>(a, b);
            weight[s][2 + half] = pick_bytes<0x7632>(a, b);
        }
    }

    // Adds all of k, stage by stage.
    __device__ __forceinline__ void add(const Params& p, u32 ring, u32 full, u32 empty, int warpgroup_row, Cursor& cursor) {
        const int lane = threadIdx.x % 32;
        const int g = lane / 4;
        const int q = lane % 4;
        const int row = warpgroup_row + threadIdx.x / 32 % 4 * 16 + g;  // and row + 8
        const int stages = stage_count(p);
        u32 flipped[2][kSteps][4];
        u32 plain[kPlainSets][kSteps][4];
        u32 used = 0;  // the barrier of the stage before
        for (int stage = 0; stage < stages; ++stage) {
            const u32 slot = ring + cursor.slot * kStageBytes;
            const u32 weights = slot + kXBytes + row * 128;
            const u32 masks = slot + kXBytes + kWeightBytes + row * kMaskRowBytes;
            barrier_wait(full + 8 * cursor.slot, cursor.parity);
            __syncwarp();
#pragma unroll
            for (int sub = 0; sub < kSub; ++sub) {
                Vec16 octet[2][2];  // rows row and row + 8, octets 2 q and 2 q + 1
                MaskWords<(kCount > 0 ? kCount : 1)> bits[2];
                const u64 b = wgmma_descriptor(slot + sub * kTokens * 128);
#pragma unroll
                for (int group = 0; group < kGroups; ++group) {
                    const int part = group / kProducts;
                    const int mask = group % kProducts - (kTotal ? 1 : 0);
                    const int order = sub * kGroups + group;
                    u32(&weight)[kSteps][4] = plain[part % kPlainSets];
                    const auto load = [&] {
#pragma unroll
                        for (int half = 0; half < 2; ++half) {
#pragma unroll
                            for (int o = 0; o < 2; ++o)
                                octet[half][o] = load_shared_16(weights + (sub * kBlockRows + 8 * half) * 128 +
                                                                (2 * q + o ^ (row & 1)) * 16);
                            if constexpr (kParts == 1 && !kRoomy) {  // at once: registers are few
                                pair_up(weight, octet[half], half, 0);
#pragma unroll
                                for (int s = 0; s < kSteps; ++s) keep(weight[s][half]), keep(weight[s][2 + half]);
                            }
                        }
                        if constexpr (kCount > 0) {
#pragma unroll
                            for (int half = 0; half < 2; ++half)
                                bits[half] = load_share<kFirst, kCount>(masks + 8 * half * kMaskRowBytes,
                                                                        (sub * 8 + 2 * q) * kMasks, row & 1);
                        }
                    };
                    if (kRoomy && group == 0) load();
                    if (pending(group) == 0) wgmma_wait<0>();
                    else wgmma_wait<1>();
                    // All but the last of this stage's groups are done, and so is the stage before.
                    if (order == 1 && used) {
                        __syncwarp();
                        if (lane == 0) barrier_arrive(used);
                    }
                    if (!kRoomy && group == 0) load();
                    if ((kParts > 1 || kRoomy) && group % kProducts == 0) {
                        pair_up(weight, octet[0], 0, part);
                        pair_up(weight, octet[1], 1, part);
                    }
                    if (mask < 0) {
                        if constexpr (kTotal) multiply(t, weight, b + 2 * part * kSteps);
                    } else if constexpr (kCount > 0) {
                        u32(&signs)[kSteps][4] = flipped[(part * kCount + mask) % 2];
#pragma unroll
                        for (int s = 0; s < kSteps; ++s)
#pragma unroll
                            for (int r = 0; r < 4; ++r)
                                signs[s][r] = flip_signs(
                                    weight[s][r], bits[r % 2].bits_by_product(mask, 2 * (part * kSteps + s) + r / 2));
                        multiply(f[mask], signs, b + 2 * part * kSteps);
                    }
                }
            }
            used = empty + 8 * cursor.slot;
            cursor.advance();
        }
        wgmma_wait<0>();
        __syncwarp();
        if (lane == 0) barrier_arrive(used);
    }

    // `sum` and this share's terms, one after another: the same bits however masks are shared out.
    __device__ __forceinline__ float add_terms(const Params& p, float sum, float total, int column, int token) const {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            const float gate = 0.5f * (total - f[i][column]);
            const float value = 0.5f * (total + f[i][column]);
            const bool routed = kRouteType >= 0 && token < p.tokens;
            const float route = routed ? load_route<kRouteType>(p, token, kFirst + i) : 1.0f;
            sum += route * (activate<kActivation, true>(gate) * value);
        }
        return sum;
    }
};

// Writes 16 rows of 8 tokens: a thread brings rows g and g + 8 of tokens 2 q and 2 q + 1.
__device__ __forceinline__ void store(const Params& p, const float (&y)[4], int row, int owned, int token, int lane) {
    const auto pack = [](float low, float high) {
        return static_cast<u32>(from_float<kType>(low)) | static_cast<u32>(from_float<kType>(high)) << 16;
    };
    const u32 half[2] = {transpose(pack(y[0], y[1])), transpose(pack(y[2], y[3]))};  // two rows of one token
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

__device__ __forceinline__ void load_4(float (&value)[4], const float4* from) {
    const float4 v = *from;
    value[0] = v.x, value[1] = v.y, value[2] = v.z, value[3] = v.w;
}

// The work of warpgroup kGroup of those that share 64 rows.
template <int kGroup>
__device__ __forceinline__ void consume(const Params& p, u32 ring, u32 full, u32 empty, float4* exchange, int row_group) {
    constexpr bool kTotal = kGroup == 0;
    constexpr bool kDone = kGroup == kMaskGroups - 1;
    constexpr int kFirst = kTotal ? 0 : share_start(kGroup) - 1;
    constexpr int kCount = share_start(kGroup + 1) - 1 - kFirst;
    const int thread = threadIdx.x % 128;
    const int lane = thread % 32;
    const int warpgroup_row = min(row_group * 64, kBlockRows - 64);
    // Each thread hands on to the same thread of the second warpgroup, which writes the result.
    float4* totals = exchange + row_group * (kColumns / 2 * 128) + thread;
    float4* terms = totals + kColumns / 4 * 128;
    const int handed_on = 1 + 2 * row_group;  // named barriers
    const int taken = 2 + 2 * row_group;
    const int tiles = tile_count(p);
    Cursor cursor;
    Sums<kTotal, kFirst, kCount> sums;
    for (int index = blockIdx.x; index < tiles; index += gridDim.x) {
        const Tile tile = tile_at(p, index);
        const int row = tile.row + warpgroup_row + thread / 32 * 16;
        const int owned = max(tile.owned, tile.row + row_group * 64);
        sums.clear();
        sums.add(p, ring, full, empty, warpgroup_row, cursor);
        if constexpr (!kTotal) named_sync<256>(handed_on);
        else if (!kDone && index != blockIdx.x) named_sync<256>(taken);
#pragma unroll
        for (int j = 0; j < kColumns / 4; ++j) {
            const int token = tile.token + 8 * j;
            float total[4], y[4] = {};
            if constexpr (kTotal) {
#pragma unroll
                for (int r = 0; r < 4; ++r) total[r] = sums.t[4 * j + r];
            } else {
                load_4(total, totals + j * 128);
                load_4(y, terms + j * 128);
            }
#pragma unroll
            for (int r = 0; r < 4; ++r)
                y[r] = sums.add_terms(p, y[r], total[r], 4 * j + r, token + lane % 4 * 2 + r % 2);
            if constexpr (kDone) {
                store(p, y, row, owned, token, lane);
            } else {
                totals[j * 128] = make_float4(total[0], total[1], total[2], total[3]);
                terms[j * 128] = make_float4(y[0], y[1], y[2], y[3]);
            }
        }
        if constexpr (!kDone) named_arrive<256>(handed_on);
        else if (!kTotal && index + gridDim.x < tiles) named_arrive<256>(taken);
    }
}

// Registers a thread, multiples of 8: what the launch gives each, moved from the copying warpgroup to the others.
constexpr int kCopyRegisters = kConsumers == 2 ? 40 : 32;
constexpr int kMultiplyRegisters = kConsumers == 2 ? 232 : 112;
static_assert(kConsumers <= 4, "registers for four multiplying warpgroups at most");

}  // namespace mglu

extern "C" __global__ void __launch_bounds__(mglu::kThreads, 1) mglu_tile_wgmma(const __grid_constant__ mglu::Params p) {
    using namespace mglu;
    extern __shared__ __align__(1024) u8 shared[];
    const u32 ring = shared_address(shared);
    float4* exchange = reinterpret_cast<float4*>(shared + kStages * kStageBytes);
    const u32 full = ring + kStages * kStageBytes + kExchangeBytes;
    const u32 empty = full + 8 * kStages;
    if (threadIdx.x == 0) {
        for (int s = 0; s < kStages; ++s) {
            barrier_init(full + 8 * s, 129);              // the threads that copy, and one of them for x
            barrier_init(empty + 8 * s, 4 * kConsumers);  // the warps that multiply
        }
        barriers_are_ready();
    }
    __syncthreads();
    let_next_kernel_start();

    const int warpgroup = threadIdx.x / 128;
    if (warpgroup == kConsumers) {
        if constexpr (kConsumers > 1) give_registers<kCopyRegisters>();
        produce(p, ring, full, empty);
    } else {
        if constexpr (kConsumers > 1) take_registers<kMultiplyRegisters>();
        const int row_group = warpgroup / kMaskGroups;
        if (warpgroup % kMaskGroups == 0) consume<0>(p, ring, full, empty, exchange, row_group);
        else if constexpr (kMaskGroups == 2) consume<1>(p, ring, full, empty, exchange, row_group);
    }
}
