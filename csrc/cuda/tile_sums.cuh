// A multiplying warpgroup of tile_wgmma.cu: fragments of W and masks out of the ring, and sums over k.
#pragma once
#include "activation.cuh"
#include "element.cuh"
#include "finish.cuh"
#include "mask_fragment.cuh"
#include "tile.cuh"

namespace mglu {

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

// Where the next stage is, once all of it is there for this warp.
__device__ __forceinline__ u32 wait_for_stage(u32 ring, u32 full, const Cursor& cursor) {
    const u32 slot = ring + cursor.slot * kStageBytes;
    barrier_wait(full + 8 * cursor.slot, cursor.parity);
    __syncwarp();
    return slot;
}

// This warp is done with a stage, of which this is the barrier: of a cluster, that of block `lane`.
__device__ __forceinline__ void give_back(u32 empty, int lane) {
    __syncwarp();
    if constexpr (kCluster > 1) {
        if (lane < kCluster) barrier_arrive_in_cluster(empty);
    } else {
        if (lane == 0) barrier_arrive(empty);
    }
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

    // Columns as permute_x.cu has turned them: of all steps of a chunk, those of two octets.
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
            const u32 slot = wait_for_stage(ring, full, cursor);
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
                    if (sub * kGroups + group == 1 && used) give_back(used, lane);
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
        give_back(used, lane);
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
            const u32 slot = wait_for_stage(ring, full, cursor);
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
                    if (sub == 0 && odd == 1 && used) give_back(used, lane);
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
        give_back(used, lane);
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

}  // namespace mglu
