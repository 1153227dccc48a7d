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
// the four threads of a row each read all its masks, for two bits of a byte; in that of turn_x.cu each reads a fourth.
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
#include "activation.cuh"
#include "element.cuh"
#include "finish.cuh"
#include "mask_fragment.cuh"
#include "params.cuh"
#include "ptx.cuh"
#include "wgmma.cuh"

namespace mglu {

constexpr int kType = MGLU_ELEMENT;
constexpr int kMasks = MGLU_N_MASKS;
constexpr int kActivation = MGLU_ACTIVATION;
constexpr int kRouteType = MGLU_ROUTE;             // -1: no route weights
constexpr int kTokens = MGLU_TOKEN_COLUMNS;        // tokens of a tile: N of the wgmma
constexpr int kBlockRows = MGLU_BLOCK_ROWS;        // rows of W of a tile, a multiple of 16
constexpr int kMaskGroups = MGLU_MASK_GROUPS;      // warpgroups that share 64 rows, each with its part of the masks
constexpr int kPasses = MGLU_PASSES;               // over k, each with as many of the masks
constexpr int kStages = MGLU_STAGES;               // depth of the ring
constexpr int kSub = MGLU_SUB;                     // 64-wide chunks of k a stage
constexpr int kSteps = MGLU_STEPS;                 // wgmmas of 16 columns issued together: 1, 2 or 4
constexpr bool kSparse = MGLU_SPARSE != 0;         // masks are places of sparse products, instead of flips of signs
constexpr bool kTurned = MGLU_TURNED != 0;         // p.x is the copy that turn_x.cu made, launched just before
constexpr bool kBulkMasks = MGLU_BULK_MASKS != 0;  // rows of masks are 16-byte aligned, so that the copy engine takes them

constexpr int kRowGroups = (kBlockRows + 63) / 64;
constexpr int kConsumers = kRowGroups * kMaskGroups;
constexpr int kThreads = 128 * (kConsumers + 1);
constexpr int kColumns = kTokens / 2;  // sums of one product in a thread
constexpr int kSwath = 8;              // tiles of rows that are walked together along the tokens
constexpr int kPassMasks = kMasks / kPasses;
static_assert(kBlockRows % 16 == 0 && kBlockRows >= 64, "whole warps of rows, and one warpgroup at least");
static_assert(kMaskGroups == 1 || kMaskGroups == 2, "one warpgroup for all masks, or two");
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
    TensorMap weight;  // [out_features][in_features] in boxes of kBlockRows by 64
    TensorMap masks;   // [out_features][in_features / 8 kMasks] in boxes of kBlockRows by kMaskRowBytes
};

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

// --- the copying thread ---

// What a stage needs but x. Weights past the row's end become zeros. Mask bits there flip zeros: they may be anything.
__device__ __forceinline__ void copy_weights(const TileParams& tp, u32 slot, u32 barrier, int row, int stage, u32 bytes_of_x,
                                             u64 policy) {
    const u32 weights = slot + kXBytes;
    barrier_expect(barrier, bytes_of_x + kWeightBytes + kMaskBytes);
#pragma unroll
    for (int sub = 0; sub < kSub; ++sub)
        copy_box(weights + sub * kBlockRows * 128, tp.weight, (stage * kSub + sub) * 64, row, barrier, policy);
#pragma unroll
    for (int piece = 0; kBulkMasks && piece < kSub / kMaskSpan; ++piece)
        copy_box(weights + kWeightBytes + piece * kBlockRows * kMaskRowBytes, tp.masks,
                 (stage * (kSub / kMaskSpan) + piece) * kMaskRowBytes, row, barrier, policy);
}

__device__ __forceinline__ void produce(const TileParams& tp, u32 ring, u32 landed, u32 empty) {
    const Params& p = tp.p;
    const int stages = stage_count(p);
    const int tiles = tile_count(p);
    const u64 policy = cache_policy(p.tokens <= kTokens && kPasses == 1);
    // Rows of zeros past the last token count too, but a box has no more than the tokens there are: those took longer.
    const u32 bytes_of_x = kTurned ? kXBytes : kSub * min(kTokens, p.tokens) * 128;
    // A turned x comes when the ring is filled: turn_x has waited for all kernels before itself, so that only x is new.
    const int early = kTurned ? min(kStages, stages) : 0;
    for (int stage = 0; stage < early; ++stage)
        copy_weights(tp, ring + stage * kStageBytes, landed + 8 * stage, tile_at(p, blockIdx.x).row, stage, bytes_of_x, policy);
    wait_for_earlier_kernels();
    int to_fill = early;
    Cursor cursor;
    for (int index = blockIdx.x; index < tiles; index += gridDim.x) {
        const Tile tile = tile_at(p, index);
        for (int pass = 0; pass < kPasses; ++pass) {
            const u8* turned = static_cast<const u8*>(p.x) + static_cast<i64>(tile.token / kTokens) * stages * kXBytes;
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
                        copy_box(slot + (sub + 1) * kChunkOfX - kTokens * 128, tp.x, (stage * kSub + sub) * 64, tile.token,
                                 barrier, cache_policy(false));
                }
                cursor.advance();
            }
        }
    }
}

// --- the warps that put zeros between the columns of x, for sparse products ---

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
    const int grid = gridDim.x;
    const int tiles = (tile_count(p) - static_cast<int>(blockIdx.x) + grid - 1) / grid;  // of this block
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

// --- the multiplying warpgroups ---

// The mask words of one lane for masks kFirst to kFirst + kCount - 1 of a pass, of its octets 2 q and 2 q + 1 of a chunk.
// All masks of the pass are read, in wide pieces, whichever are wanted: eight lanes then read neighbours, where narrow
// pieces of rows 64 or 128 bytes apart would meet in one bank.
// row: where the chunk's masks of this row start; swizzle: the row modulo 8.
template <int kFirst, int kCount, bool kInPieces = kSwizzleMasks || (kPasses > 1)>
__device__ __forceinline__ MaskWords<kCount> load_share(u32 row, int q, int swizzle, int pass) {
    MaskWords<kInPieces ? kPassMasks : kMasks> all;
    if constexpr (kInPieces) {
        const u32 at_a = row + (kSwizzleMasks ? (2 * q ^ swizzle) * 16 : 2 * q * kMasks) + pass * kPassMasks;
        const u32 at_b = row + (kSwizzleMasks ? (2 * q + 1 ^ swizzle) * 16 : (2 * q + 1) * kMasks) + pass * kPassMasks;
        constexpr int kWords = kInPieces ? kPassMasks / 4 : 1;
        u32 a[kWords], b[kWords];
        load_shared_words(a, at_a);
        load_shared_words(b, at_b);
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
            all.word[2 * w] = pick_bytes<0x5410>(a[w], b[w]);
            all.word[2 * w + 1] = pick_bytes<0x7632>(a[w], b[w]);
        }
    } else {
        all = load_mask_words<kMasks>(row + 2 * q * kMasks);
    }
    MaskWords<kCount> masks;
#pragma unroll
    for (int w = 0; w < MaskWords<kCount>::kWords; ++w) {
        const int i = kFirst + 2 * w;  // an odd start takes its two masks from two words
        const int next = i / 2 + 1 < MaskWords<kPassMasks>::kWords ? i / 2 + 1 : i / 2;
        masks.word[w] = i % 2 == 0 ? all.word[i / 2] : pick_bytes<0x6341>(all.word[i / 2], all.word[next]);
    }
    return masks;
}

// The same from global memory, byte by byte, for rows of masks that the copy engine cannot take.
// row: the masks of this row; octet: the first of the two; bytes past the row's end are not read.
template <int kFirst, int kCount>
__device__ __forceinline__ MaskWords<kCount> read_share(const u8* row, int octet, int octets, int pass) {
    const u8* first = row + static_cast<i64>(octet) * kMasks + pass * kPassMasks + kFirst;
    MaskWords<kCount> masks;
#pragma unroll
    for (int w = 0; w < MaskWords<kCount>::kWords; ++w) {
        masks.word[w] = 0;
#pragma unroll
        for (int byte = 0; byte < 4; ++byte) {
            const int mask = 2 * w + byte % 2;
            if (mask < kCount && octet + byte / 2 < octets)
                masks.word[w] |= static_cast<u32>(first[byte / 2 * kMasks + mask]) << (8 * byte);
        }
    }
    return masks;
}

// The mask bytes of kOctets octets of one row of W, those of the masks of a pass: out of the ring, where the chunk's masks of
// this row start at `row`; swizzle: the row modulo 8.
template <int kOctets>
__device__ __forceinline__ void load_bytes(u32 (&bytes)[(kOctets * kPassMasks + 3) / 4], u32 row, int octet, int swizzle,
                                           int pass) {
    if constexpr (kSwizzleMasks || kPasses > 1) {
        constexpr int kWords = kSwizzleMasks || kPasses > 1 ? kPassMasks / 4 : 1;
#pragma unroll
        for (int o = 0; o < kOctets; ++o) {
            u32 word[kWords];
            const int at = kSwizzleMasks ? (octet + o ^ swizzle) * 16 : (octet + o) * kMasks;
            load_shared_words(word, row + at + pass * kPassMasks);
#pragma unroll
            for (int w = 0; w < kWords; ++w) bytes[o * kWords + w] = word[w];
        }
    } else {
        load_mask_stream<kOctets * kMasks>(bytes, row + octet * kMasks);
    }
}

// The same from global memory, for rows of masks that the copy engine cannot take. Bytes past the row's end are not read.
template <int kOctets>
__device__ __forceinline__ void read_bytes(u32 (&bytes)[(kOctets * kPassMasks + 3) / 4], const u8* row, int octet, int octets,
                                           int pass) {
#pragma unroll
    for (int w = 0; w < (kOctets * kPassMasks + 3) / 4; ++w) bytes[w] = 0;
#pragma unroll
    for (int o = 0; o < kOctets; ++o) {
        if (octet + o >= octets) break;
        const u8* from = row + static_cast<i64>(octet + o) * kMasks + pass * kPassMasks;
#pragma unroll
        for (int i = 0; i < kPassMasks; ++i) {
            const int at = o * kPassMasks + i;
            bytes[at / 4] |= static_cast<u32>(from[i]) << (8 * (at % 4));
        }
    }
}

__device__ __forceinline__ void load_4(float (&value)[4], const float4* from) {
    const float4 v = *from;
    value[0] = v.x, value[1] = v.y, value[2] = v.z, value[3] = v.w;
}

// Which of 8 rows of W is row g of a sparse product: 0, 5, 2, 7, 1, 4, 3, 6, so that of a load of 8 bytes a lane, the first and
// the second 16 lanes each meet all banks once, in W (vector v of row r at v ^ r) as in masks of 32, 64 or 128 bytes a row.
__device__ __forceinline__ int sparse_row(int g) { return g % 2 * 4 | (g & 2) | (g / 4 ^ g % 2); }

// The sums of 64 rows for t, if kTotal, and for the masks from kFirst to kFirst + kCount - 1: f_i, or s_i with kSparse.
template <bool kTotal, int kFirst, int kCount>
struct Sums {
    float t[kColumns];
    float f[kCount][kColumns];

    static constexpr int kParts = 4 / kSteps;  // of a chunk
    static constexpr int kProducts = kCount + (kTotal ? 1 : 0);
    static constexpr int kGroups = kParts * kProducts;  // of wgmmas in a chunk, in order: by part, t before the masks
    static constexpr bool kRoomy = kProducts * kColumns + 128 <= kRegisters;  // for loads ahead of the wait
    static_assert(kSparse || kGroups * kSub >= 2, "a stage is given back during the next");
    static_assert(kCount > 0, "each has a mask");

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

    // The lane's masks in a chunk, of row `row_of_8` + 8 half of its warp's 16: out of the ring, or out of global memory.
    __device__ __forceinline__ static void load_bits(MaskWords<kCount>& bits, const Params& p, u32 masks, const u8* mask_rows,
                                                     int half, int q, int row_of_8, int chunk, int pass) {
        if constexpr (kBulkMasks)
            bits = load_share<kFirst, kCount>(masks + 8 * half * kMaskRowBytes, q, row_of_8, pass);
        else
            bits = read_share<kFirst, kCount>(mask_rows + 8 * half * p.mask_row_stride, chunk * 8 + 2 * q,
                                              p.in_features / 8, pass);
    }

    // What a lane has of 16 rows of W (rows g and g + 8) and of their masks, part by part of a chunk: of a step, `weight` is
    // wgmma's A operand, and sign(mask, step, r) has the flips of its register r. It is loaded around the wait for products.
    struct Fragments {
        const Params& p;
        const int g = threadIdx.x % 32 / 4;
        const int q = threadIdx.x % 4;
        const int pass;
        const int row;            // row g, of the tile
        const u8* const of_masks;  // its masks
        u32 weight[kSteps][4];

        __device__ __forceinline__ Fragments(const Params& p, int tile_row, int warp_row, int pass)
            : p(p), pass(pass), row(warp_row + g), of_masks(p.masks + (tile_row + row) * p.mask_row_stride) {}

        // Where the masks of the row are in a stage.
        __device__ __forceinline__ u32 masks_of(int sub) const {
            return kXBytes + kWeightBytes + (sub / kMaskSpan * kBlockRows + row) * kMaskRowBytes +
                   sub % kMaskSpan * (8 * kMasks);
        }
    };

    // Columns in their order: of a step, those of two octets, of which a lane has two columns each.
    struct InOrder : Fragments {
        using Fragments::weight;
        static constexpr int kOctets = 2 * kSteps;  // of a part
        static constexpr int kBytes = kOctets * kPassMasks;
        static constexpr bool kAhead = kProducts * kColumns + 100 <= kRegisters;  // loads are ahead of the wait
        const u32 matrix;
        u32 bytes[2][(kBytes + 3) / 4];

        __device__ __forceinline__ InOrder(const Params& p, int tile_row, int warp_row, int pass)
            : Fragments(p, tile_row, warp_row, pass),
              matrix(kXBytes + (warp_row + threadIdx.x % 16) * 128 + (threadIdx.x % 32 / 16 ^ threadIdx.x % 8) * 16) {}

        __device__ __forceinline__ void before_wait(u32 slot, int sub, int chunk, int part) {
            if constexpr (kAhead) load(slot, sub, chunk, part);
        }
        __device__ __forceinline__ void after_wait(u32 slot, int sub, int chunk, int part) {
            if constexpr (!kAhead) load(slot, sub, chunk, part);
        }
        __device__ __forceinline__ void load(u32 slot, int sub, int chunk, int part) {
#pragma unroll
            for (int s = 0; s < kSteps; ++s)
                load_matrices(weight[s], slot + sub * kBlockRows * 128 + (matrix ^ (part * kSteps + s) * 32));
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if constexpr (kBulkMasks)
                    load_bytes<kOctets>(bytes[half], slot + this->masks_of(sub) + 8 * half * kMaskRowBytes, part * kOctets,
                                        this->g, this->pass);
                else
                    read_bytes<kOctets>(bytes[half], this->of_masks + 8 * half * this->p.mask_row_stride,
                                        chunk * 8 + part * kOctets, this->p.in_features / 8, this->pass);
            }
        }
        __device__ __forceinline__ u32 sign(int mask, int part, int step, int r) const {
            const Flips<kBytes> flips(bytes[r % 2], this->q);
            return flips.of((2 * step + r / 2) * kPassMasks + kFirst + mask);
        }
    };

    // Columns as turn_x.cu has turned them: of all steps of a chunk, those of two octets.
    struct Turned : Fragments {
        using Fragments::weight;
        Vec16 octet[2][2];  // rows g and g + 8, octets 2 q and 2 q + 1
        MaskWords<kCount> bits[2];

        using Fragments::Fragments;

        __device__ __forceinline__ void before_wait(u32 slot, int sub, int chunk, int part) {
            if (kRoomy && part == 0) load(slot, sub, chunk);
        }
        __device__ __forceinline__ void after_wait(u32 slot, int sub, int chunk, int part) {
            if (!kRoomy && part == 0) load(slot, sub, chunk);
            if constexpr (kParts > 1 || kRoomy) pair_up(0, part), pair_up(1, part);
        }
        __device__ __forceinline__ void load(u32 slot, int sub, int chunk) {
            const u32 weights = slot + kXBytes + (sub * kBlockRows + this->row) * 128;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
#pragma unroll
                for (int o = 0; o < 2; ++o)
                    octet[half][o] = load_shared_16(weights + half * 1024 + (2 * this->q + o ^ this->g) * 16);
                if constexpr (kParts == 1 && !kRoomy) {  // at once: registers are few
                    pair_up(half, 0);
#pragma unroll
                    for (int s = 0; s < kSteps; ++s) keep(weight[s][half]), keep(weight[s][2 + half]);
                }
            }
#pragma unroll
            for (int half = 0; half < 2; ++half)
                load_bits(bits[half], this->p, slot + this->masks_of(sub), this->of_masks, half, this->q, this->g, chunk,
                          this->pass);
        }
        // Pairs (A_j, B_j) of the octets A and B of a row.
        __device__ __forceinline__ void pair_up(int half, int part) {
#pragma unroll
            for (int s = 0; s < kSteps; ++s) {
                const u32 a = octet[half][0].word[part * kSteps + s];
                const u32 b = octet[half][1].word[part * kSteps + s];
                weight[s][half] = pick_bytes<0x5410>(a, b);
                weight[s][2 + half] = pick_bytes<0x7632>(a, b);
            }
        }
        __device__ __forceinline__ u32 sign(int mask, int part, int step, int r) const {
            return bits[r % 2].bits(mask, 2 * (part * kSteps + step) + r / 2);
        }
    };

    // Adds all of k, stage by stage.
    template <typename OfWeights>
    __device__ __forceinline__ void add(const Params& p, u32 ring, u32 full, u32 empty, int tile_row, int warpgroup_row,
                                        int pass, Cursor& cursor) {
        const int lane = threadIdx.x % 32;
        const int stages = stage_count(p);
        OfWeights fragments(p, tile_row, warpgroup_row + threadIdx.x / 32 % 4 * 16, pass);
        u32 used = 0;  // the barrier of the stage before
        for (int stage = 0; stage < stages; ++stage) {
            const u32 slot = ring + cursor.slot * kStageBytes;
            barrier_wait(full + 8 * cursor.slot, cursor.parity);
            __syncwarp();
#pragma unroll
            for (int sub = 0; sub < kSub; ++sub) {
                const int chunk = stage * kSub + sub;
                const u64 b = wgmma_descriptor(slot + sub * kTokens * 128);
#pragma unroll
                for (int group = 0; group < kGroups; ++group) {
                    const int part = group / kProducts;
                    const int mask = group % kProducts - (kTotal ? 1 : 0);
                    if (group % kProducts == 0) fragments.before_wait(slot, sub, chunk, part);
                    if (pending(group) == 0) wgmma_wait<0>();
                    else wgmma_wait<1>();
                    // All but the last of this stage's groups are done, and so is the stage before.
                    if (sub * kGroups + group == 1 && used) {
                        __syncwarp();
                        if (lane == 0) barrier_arrive(used);
                    }
                    if (group % kProducts == 0) fragments.after_wait(slot, sub, chunk, part);
                    if (mask < 0) {
                        if constexpr (kTotal) multiply(t, fragments.weight, b + 2 * part * kSteps);
                    } else {
                        u32 flipped[kSteps][4];
#pragma unroll
                        for (int s = 0; s < kSteps; ++s)
#pragma unroll
                            for (int r = 0; r < 4; ++r)
                                flipped[s][r] = flip_signs(fragments.weight[s][r], fragments.sign(mask, part, s, r));
                        multiply(f[mask], flipped, b + 2 * part * kSteps);
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

    // The same with sparse products, whose fragments serve t and all masks. The products of a chunk's even weights are one
    // group, those of its odd ones the other; while one runs, the other's fragments are made.
    __device__ __forceinline__ void add_sparse(const Params& p, u32 ring, u32 full, u32 empty, int tile_row, int warpgroup_row,
                                               int pass, Cursor& cursor) {
        const int lane = threadIdx.x % 32;
        const int g = lane / 4;
        const int q = lane % 4;
        const int of_8 = sparse_row(g);
        const int row = warpgroup_row + threadIdx.x / 32 % 4 * 16 + of_8;  // and row + 8
        const int stages = stage_count(p);
        const u8* mask_rows = p.masks + (tile_row + row) * p.mask_row_stride;
        const PlaceConstants constants;
        u32 used = 0;
        for (int stage = 0; stage < stages; ++stage) {
            const u32 slot = ring + cursor.slot * kStageBytes;
            barrier_wait(full + 8 * cursor.slot, cursor.parity);
            __syncwarp();
#pragma unroll
            for (int sub = 0; sub < kSub; ++sub) {
                const u32 weights = slot + kXBytes + (sub * kBlockRows + row) * 128 + q % 2 * 8;
                const u32 masks = slot + kXBytes + kWeightBytes +
                                  (sub / kMaskSpan * kBlockRows + row) * kMaskRowBytes + sub % kMaskSpan * (8 * kMasks);
                u32 word[4][2][2];
                MaskWords<kCount> bits[2];
                const auto load = [&] {
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
#pragma unroll
                        for (int source = 0; source < 4; ++source)
                            load_shared_words(word[source][half], weights + half * 1024 + (2 * source + q / 2 ^ of_8) * 16);
                        load_bits(bits[half], p, masks, mask_rows, half, q, of_8, stage * kSub + sub, pass);
                    }
                };
                if (kRoomy) load();
#pragma unroll
                for (int odd = 0; odd < 2; ++odd) {
                    wgmma_wait<1>();
                    if (sub == 0 && odd == 1 && used) {
                        __syncwarp();
                        if (lane == 0) barrier_arrive(used);
                    }
                    if (!kRoomy && odd == 0) load();
                    SparseWeights weight;
#pragma unroll
                    for (int i = 0; i < 8; ++i) weight.set(i / 2, i % 2, word[i / 2][i % 2], odd);
                    const Places<kCount> places(bits[0], bits[1], odd, constants);
                    multiply_sparse(weight, places, constants, slot + sub * kTokens * 256 + odd * 64);
                }
            }
            used = empty + 8 * cursor.slot;
            cursor.advance();
        }
        wgmma_wait<0>();
        __syncwarp();
        if (lane == 0) barrier_arrive(used);
    }

    // x: where the even columns of the chunk's first piece start, or the odd ones.
    __device__ __forceinline__ void multiply_sparse(const SparseWeights& weight, const Places<kCount>& places,
                                                    const PlaceConstants& constants, u32 x) {
#pragma unroll
        for (int r = 0; r < 8; ++r) asm volatile("" ::"r"(weight.value[r / 4][r % 4]));
#pragma unroll
        for (int i = 0; i < kCount; ++i) asm volatile("" ::"r"(places.of[i]));
        wgmma_fence();
        multiply_piece<0>(weight, places, constants, wgmma_descriptor(x));
        multiply_piece<1>(weight, places, constants, wgmma_descriptor(x + kTokens * 128));
        wgmma_commit();
    }

    template <int kPair>
    __device__ __forceinline__ void multiply_piece(const SparseWeights& weight, const Places<kCount>& places,
                                                   const PlaceConstants& constants, u64 b) {
        using Product = Wgmma<kTokens, kType == kBfloat16>;
        if constexpr (kTotal) Product::template run_sparse<kPair>(t, weight.value[kPair], b, constants.all_at_x);
#pragma unroll
        for (int i = 0; i < kCount; ++i) Product::template run_sparse<kPair>(f[i], weight.value[kPair], b, places.of[i]);
    }

    // `sum` and this share's terms, one after another: the same bits however masks are shared out.
    __device__ __forceinline__ float add_terms(const Params& p, float sum, float total, int column, int token,
                                               int pass) const {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            const float gate = kSparse ? f[i][column] : 0.5f * (total - f[i][column]);
            const float value = kSparse ? total - gate : 0.5f * (total + f[i][column]);
            const bool routed = kRouteType >= 0 && token < p.tokens;
            const float route = routed ? load_route<kRouteType>(p, token, pass * kPassMasks + kFirst + i) : 1.0f;
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
    for (int index = blockIdx.x; index < tiles; index += gridDim.x) {
        const Tile tile = tile_at(p, index);
        const bool last = index + gridDim.x >= tiles;
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

extern "C" __global__ void __launch_bounds__(mglu::kThreads, 1)
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
            barrier_init(empty + 8 * s, 4 * kConsumers);  // the warps that multiply
        }
        shared_is_written();
    }
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
        if (warpgroup % kMaskGroups == 0) consume<0>(tp.p, ring, full, empty, exchange, row_group);
        else if constexpr (kMaskGroups == 2) consume<1>(tp.p, ring, full, empty, exchange, row_group);
    }
}
