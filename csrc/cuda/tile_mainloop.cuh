// The mainloop of a consumer warpgroup of tile_wgmma.cu. It loads fragments of W and masks from the ring, and issues
// the wgmmas.
#pragma once
#include "activation.cuh"
#include "element.cuh"
#include "mask_fragment.cuh"
#include "packed_masks.cuh"
#include "mask_weights.cuh"
#include "tile.cuh"

namespace mglu {

// Loads a lane's mask words from the ring, for masks kFirst to kFirst + kCount - 1 of a pass and columns 16q to 16q +
// 15 of a chunk. `row` is the address of the row's masks of the chunk, and `swizzle` is the row modulo 8.
//
// Wide loads read all masks of the pass, even those that the lane does not need, so that eight lanes read neighbouring
// bytes. Narrow loads from rows 64 or 128 bytes apart would conflict in one bank.
template <int kFirst, int kCount, bool kWideLoads = kSwizzleMasks || (kPasses > 1)>
__device__ __forceinline__ MaskWords<kCount> load_pass_words(u32 row, int q, int swizzle, int pass) {
    MaskWords<kWideLoads ? kPassMasks : kMasks> all;
    if constexpr (kWideLoads) {
        const u32 at_a = row + (kSwizzleMasks ? (2 * q ^ swizzle) * 16 : 2 * q * kMasks) + pass * kPassMasks;
        const u32 at_b = row + (kSwizzleMasks ? (2 * q + 1 ^ swizzle) * 16 : (2 * q + 1) * kMasks) + pass * kPassMasks;
        constexpr int kWords = kWideLoads ? kPassMasks / 4 : 1;
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
        const int i = kFirst + 2 * w;  // if i is odd, the two masks come from different words
        const int next = i / 2 + 1 < MaskWords<kPassMasks>::kWords ? i / 2 + 1 : i / 2;
        masks.word[w] = i % 2 == 0 ? all.word[i / 2] : pick_bytes<0x6341>(all.word[i / 2], all.word[next]);
    }
    return masks;
}

// Reads the words of load_pass_words() from global memory, byte by byte, for masks whose rows are not aligned for TMA.
// `row` points to the masks of the row, and the first column is 8 * octet. Bytes past the end of the row are not read.
template <int kFirst, int kCount>
__device__ __forceinline__ MaskWords<kCount> read_pass_words(const u8* row, int octet, int octets, int pass) {
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

// Loads the mask bytes of a pass from the ring, for 8 kOctets columns of a row of W. `row` is the address of the row's
// masks of the chunk, and `swizzle` is the row modulo 8.
template <int kOctets>
__device__ __forceinline__ void load_pass_bytes(u32 (&bytes)[(kOctets * kPassMasks + 3) / 4], u32 row, int octet,
                                                int swizzle, int pass) {
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

// Reads the bytes of load_pass_bytes() from global memory, for masks whose rows are not aligned for TMA. Bytes past the
// end of the row are not read.
template <int kOctets>
__device__ __forceinline__ void read_pass_bytes(u32 (&bytes)[(kOctets * kPassMasks + 3) / 4], const u8* row, int octet,
                                                int octets, int pass) {
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

// Waits until the next stage is complete, and returns its address.
__device__ __forceinline__ u32 wait_for_stage(u32 ring, u32 full, const RingPosition& position) {
    const u32 slot = ring + position.slot * kStageBytes;
    barrier_wait(full + 8 * position.slot, position.parity);
    __syncwarp();
    return slot;
}

// Releases a stage by arriving at `empty`, its empty barrier. In a cluster, lane n passes the address of block n's
// barrier.
__device__ __forceinline__ void release_stage(u32 empty, int lane) {
    __syncwarp();
    if constexpr (kCluster > 1) {
        if (lane < kCluster) barrier_arrive_in_cluster(empty);
    } else {
        if (lane == 0) barrier_arrive(empty);
    }
}

// Maps row g of a sparse MMA to one of 8 rows of W: 0, 5, 2, 7, 1, 4, 3, 6. In this order each half of a warp, whose
// lanes load 8 bytes each, uses every bank once, both for W (vector v of row r at v ^ r) and for masks of 32, 64
// or 128 bytes per row.
__device__ __forceinline__ int sparse_row(int g) { return g % 2 * 4 | (g & 2) | (g / 4 ^ g % 2); }

// The scales of the current stage for a lane's two rows of W, 8 rows apart, if groups of 128 columns have scales. The
// scales are loaded a stage ahead, so that nothing waits for them. A weight times its scale is rounded to x's type, as
// in decode_weight.
struct StageScales {
    float now[2], next[2];

    __device__ __forceinline__ void load_next(const Params& p, int row, int stage) {
        static_assert(!kScalesColumns<kFormat> || kStageChunks <= 2, "a stage belongs to one group of columns");
        if constexpr (kScalesColumns<kFormat>) {
            const int column = stage * kStageChunks * 64;
#pragma unroll
            for (int half = 0; half < 2 && column < p.in_features; ++half)
                next[half] = StoredWeight<kFormat, kType>::scale(p, row + 8 * half, column);
        }
    }
    // Moves to stage `stage`, whose scales have been loaded.
    __device__ __forceinline__ void advance(const Params& p, int row, int stage) {
        if constexpr (kScalesColumns<kFormat>) now[0] = next[0], now[1] = next[1];
        load_next(p, row, stage + 1);
    }
    // The scale of the lane's first row (half = 0) or of its second row (half = 1).
    __device__ __forceinline__ auto scale(int half) const {
        if constexpr (kScalesColumns<kFormat>) return now[half];
        else return Unscaled();
    }
};

// The accumulators of 64 rows: t if kTotal, then f_i (s_i with kSparse) of masks kFirst to kFirst + kCount - 1 of a
// pass.
template <bool kTotal, int kFirst, int kCount>
struct Accumulators {
    float t[kColumns];
    float f[kCount][kColumns];

    // A chunk has kBatches batches of kSteps wgmmas for each product (t or a mask). The wgmmas of a batch and product
    // are one commit group. Groups are ordered by batches, and within a batch t precedes the masks.
    static constexpr int kBatches = 4 / kSteps;
    static constexpr int kProducts = kCount + (kTotal ? 1 : 0);
    static constexpr int kWgmmaGroups = kBatches * kProducts;
    // True if there are registers to load fragments before the wait for earlier products.
    static constexpr bool kLoadEarly = kProducts * kColumns + 128 <= kConsumerRegisters;
    static_assert(kSparse || kFp8 || kWgmmaGroups * kStageChunks >= 2, "a stage is released during the next one");
    static_assert(kCount > 0, "each warpgroup has a mask");

    // The number of commit groups that may still run when the fragments of this group are written. It is one, since
    // fragments alternate between two sets of registers. It is zero if the previous group used the same set: without t,
    // the last group of a chunk and the first of the next one do so if a chunk has an odd number of groups.
    __device__ __forceinline__ static constexpr int pending(int group) {
        return group == 0 && !kTotal && kBatches * kCount % 2 == 1 ? 0 : 1;
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
        // Keep the last write of the fragments here. Otherwise ptxas adds fences, or makes the groups wait for each
        // other.
#pragma unroll
        for (int s = 0; s < kSteps; ++s) asm volatile("" ::"r"(a[s][0]), "r"(a[s][1]), "r"(a[s][2]), "r"(a[s][3]));
        wgmma_fence();
#pragma unroll
        for (int s = 0; s < kSteps; ++s) Wgmma<kTokens, kType == kBfloat16>::run(sums, a[s], b + 2 * s);
        wgmma_commit();
    }

    // Loads the lane's masks of a chunk from the ring or from global memory, for row `row_in_8` + 8 * half of the warp.
    __device__ __forceinline__ static void load_mask_words(MaskWords<kCount>& bits, const Params& p, u32 masks,
                                                           const u8* mask_rows, int half, int q, int row_in_8,
                                                           int chunk_of_row, int pass) {
        if constexpr (kBulkMasks)
            bits = load_pass_words<kFirst, kCount>(masks + 8 * half * kMaskRowBytes, q, row_in_8, pass);
        else
            bits = read_pass_words<kFirst, kCount>(mask_rows + 8 * half * p.mask_row_stride, chunk_of_row * 8 + 2 * q,
                                                   p.in_features / kOctet, pass);
    }

    // A lane's fragments of W (rows g and g + 8 of the warp) and of their masks, one batch of a chunk at a time. For
    // each step, `weight` is wgmma's A operand, and flips(mask, batch, step, r) returns the sign flips of the operand's
    // register r. Fragments are loaded either before or after the wait for earlier products.
    struct Fragments {
        const Params& p;
        const int g = threadIdx.x % 32 / 4;
        const int q = threadIdx.x % 4;
        const int pass;
        const int row;              // row g of the warp, as a row of the tile
        const u8* const mask_rows;  // the masks of that row in global memory
        StageScales scales;
        u32 weight[kSteps][4];

        __device__ __forceinline__ Fragments(const Params& p, int tile_row, int warp_row, int pass)
            : p(p), pass(pass), row(warp_row + g), mask_rows(p.packed_masks + (tile_row + row) * p.mask_row_stride) {}

        // The offset in a stage at which a chunk's weights begin for `row` (half = 0) or for `row` + 8 (half = 1).
        __device__ __forceinline__ u32 weight_row(int chunk, int half) const {
            return kXBytes + chunk * kWeightChunkBytes + (row + 8 * half) * kWeightRowBytes;
        }

        // The offset in a stage at which a chunk's masks begin for `row`.
        __device__ __forceinline__ u32 mask_offset(int chunk) const {
            return kXBytes + kWeightBytes + (chunk / kMaskSpan * kBlockRows + row) * kMaskRowBytes +
                   chunk % kMaskSpan * mask_bytes(64, kMasks);
        }
    };

    // Fragments for columns in their natural order. A step covers 16 columns, and a lane holds two of every 8. It reads
    // the mask bytes of all columns, and uses two bits of each byte.
    struct NaturalOrder : Fragments {
        using Fragments::weight;
        static constexpr int kOctets = 2 * kSteps;  // octets of a batch
        static constexpr int kBytes = kOctets * kPassMasks;
        static constexpr bool kLoadNaturalEarly = kProducts * kColumns + 100 <= kConsumerRegisters;
        const u32 matrix;  // the lane's address for ldmatrix, which reads dense weights
        u32 bytes[2][(kBytes + 3) / 4];

        __device__ __forceinline__ NaturalOrder(const Params& p, int tile_row, int warp_row, int pass)
            : Fragments(p, tile_row, warp_row, pass),
              matrix(kXBytes + (warp_row + threadIdx.x % 16) * 128 + (threadIdx.x % 32 / 16 ^ threadIdx.x % 8) * 16) {}

        __device__ __forceinline__ void before_wait(u32 slot, int chunk, int chunk_of_row, int batch) {
            if constexpr (kLoadNaturalEarly) load(slot, chunk, chunk_of_row, batch);
        }
        __device__ __forceinline__ void after_wait(u32 slot, int chunk, int chunk_of_row, int batch) {
            if constexpr (!kLoadNaturalEarly) load(slot, chunk, chunk_of_row, batch);
        }
        __device__ __forceinline__ void load(u32 slot, int chunk, int chunk_of_row, int batch) {
#pragma unroll
            for (int s = 0; s < kSteps; ++s) {
                const int step = batch * kSteps + s;
                if constexpr (kFormat == WeightFormat::dense) {
                    load_matrices(weight[s], slot + chunk * kWeightChunkBytes + (matrix ^ step * 32));
                } else {
#pragma unroll
                    for (int r = 0; r < 4; ++r) {
                        const int column = 16 * step + r / 2 * 8 + 2 * this->q;
                        const u32 bits = load_shared_bits<2 * Weight::kBits>(
                            slot + this->weight_row(chunk, r % 2) + weight_offset(this->g, column * Weight::kBits / 8));
                        weight[s][r] = Weight::neighbours(bits, this->scales.scale(r % 2));
                    }
                }
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if constexpr (kBulkMasks)
                    load_pass_bytes<kOctets>(bytes[half], slot + this->mask_offset(chunk) + 8 * half * kMaskRowBytes,
                                             batch * kOctets, this->g, this->pass);
                else
                    read_pass_bytes<kOctets>(bytes[half], this->mask_rows + 8 * half * this->p.mask_row_stride,
                                             chunk_of_row * 8 + batch * kOctets, this->p.in_features / kOctet,
                                             this->pass);
            }
        }
        __device__ __forceinline__ u32 flips(int mask, int batch, int step, int r) const {
            const SignFlips<kBytes> sign_flips(bytes[r % 2], this->q);
            return sign_flips.flips((2 * step + r / 2) * kPassMasks + kFirst + mask);
        }
    };

    // Fragments for columns in the order of permute_x.cu. A lane holds 16 neighbouring columns of a chunk, so that it
    // reads a quarter of the mask bytes that it would read in natural order.
    struct PermutedColumns : Fragments {
        using Fragments::weight;
        static constexpr int kOctetWords = Weight::kBits / 4;
        u32 octets[2][2 * kOctetWords];  // stored weights of rows g and g + 8, columns 16q to 16q + 15
        MaskWords<kCount> bits[2];

        using Fragments::Fragments;

        __device__ __forceinline__ void before_wait(u32 slot, int chunk, int chunk_of_row, int batch) {
            if (kLoadEarly && batch == 0) load(slot, chunk, chunk_of_row);
        }
        __device__ __forceinline__ void after_wait(u32 slot, int chunk, int chunk_of_row, int batch) {
            if (!kLoadEarly && batch == 0) load(slot, chunk, chunk_of_row);
            if constexpr (kBatches > 1 || kLoadEarly) interleave(0, batch), interleave(1, batch);
        }
        __device__ __forceinline__ void load(u32 slot, int chunk, int chunk_of_row) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                constexpr int kWords = kOctetWords < 2 ? 2 : 4;  // words of a load
#pragma unroll
                for (int w = 0; w < 2 * kOctetWords; w += kWords) {
                    u32 words[kWords];
                    load_shared_words(words, slot + this->weight_row(chunk, half) +
                                                 weight_offset(this->g, 8 * kOctetWords * this->q + 4 * w));
#pragma unroll
                    for (int j = 0; j < kWords; ++j) octets[half][w + j] = words[j];
                }
                if constexpr (kBatches == 1 && !kLoadEarly) {  // interleave now, since there are few registers
                    interleave(half, 0);
#pragma unroll
                    for (int s = 0; s < kSteps; ++s)
                        keep_in_register(weight[s][half]), keep_in_register(weight[s][2 + half]);
                }
            }
#pragma unroll
            for (int half = 0; half < 2; ++half)
                load_mask_words(bits[half], this->p, slot + this->mask_offset(chunk), this->mask_rows, half, this->q,
                                this->g, chunk_of_row, this->pass);
        }
        // Interleaves a row's two octets A and B to pairs (A_j, B_j).
        __device__ __forceinline__ void interleave(int half, int batch) {
#pragma unroll
            for (int s = 0; s < kSteps; ++s) {
                Weight::across(weight[s][half], weight[s][2 + half], octets[half], octets[half] + kOctetWords,
                               batch * kSteps + s, this->scales.scale(half));
            }
        }
        __device__ __forceinline__ u32 flips(int mask, int batch, int step, int r) const {
            return bits[r % 2].flips(mask, 2 * (batch * kSteps + step) + r / 2);
        }
    };

    // Accumulates the products over k, stage by stage.
    template <typename FragmentsOfW>
    __device__ __forceinline__ void accumulate(const Params& p, u32 ring, u32 full, u32 empty, const LaunchTile& tile,
                                               int warpgroup_row, int pass, RingPosition& position) {
        const int lane = threadIdx.x % 32;
        const int stages = stage_count(p);
        FragmentsOfW fragments(p, tile.stored_row(p), warpgroup_row + threadIdx.x / 32 % 4 * 16, pass);
        const int row = tile.scaled_row(p) + fragments.row;
        fragments.scales.load_next(p, row, 0);
        u32 unreleased = 0;  // empty barrier of the previous stage, until that stage is released
        for (int stage = 0; stage < stages; ++stage) {
            fragments.scales.advance(p, row, stage);
            const u32 slot = wait_for_stage(ring, full, position);
#pragma unroll
            for (int chunk = 0; chunk < kStageChunks; ++chunk) {
                const int chunk_of_row = stage * kStageChunks + chunk;
                const u64 b = wgmma_descriptor(slot + chunk * kTokens * 128);
#pragma unroll
                for (int group = 0; group < kWgmmaGroups; ++group) {
                    const int batch = group / kProducts;
                    const int mask = group % kProducts - (kTotal ? 1 : 0);
                    if (group % kProducts == 0) fragments.before_wait(slot, chunk, chunk_of_row, batch);
                    if (pending(group) == 0) wgmma_wait<0>();
                    else wgmma_wait<1>();
                    // Only the latest group still runs. It belongs to this stage, so release the previous stage.
                    if (chunk * kWgmmaGroups + group == 1 && unreleased) release_stage(unreleased, lane);
                    if (group % kProducts == 0) fragments.after_wait(slot, chunk, chunk_of_row, batch);
                    if (mask < 0) {
                        if constexpr (kTotal) multiply(t, fragments.weight, b + 2 * batch * kSteps);
                    } else {
                        u32 flipped[kSteps][4];
#pragma unroll
                        for (int s = 0; s < kSteps; ++s)
#pragma unroll
                            for (int r = 0; r < 4; ++r)
                                flipped[s][r] = flip_signs(fragments.weight[s][r], fragments.flips(mask, batch, s, r));
                        multiply(f[mask], flipped, b + 2 * batch * kSteps);
                    }
                }
            }
            unreleased = empty + 8 * position.slot;
            position.advance();
        }
        wgmma_wait<0>();
        release_stage(unreleased, lane);
    }

    // Accumulates sparse products, whose fragments serve t and all masks. The wgmmas of a chunk's even weights are one
    // commit group, and the wgmmas of its odd weights are another. While one group runs, the fragments of the other
    // group are computed.
    __device__ __forceinline__ void accumulate_sparse(const Params& p, u32 ring, u32 full, u32 empty,
                                                      const LaunchTile& tile, int warpgroup_row, int pass,
                                                      RingPosition& position) {
        const int lane = threadIdx.x % 32;
        const int g = lane / 4;
        const int q = lane % 4;
        const int row_in_8 = sparse_row(g);
        const int row = warpgroup_row + threadIdx.x / 32 % 4 * 16 + row_in_8;  // the lane also holds row + 8
        const int stages = stage_count(p);
        const int scaled_row = tile.scaled_row(p) + row;
        const u8* mask_rows = p.packed_masks + (tile.stored_row(p) + row) * p.mask_row_stride;
        const MetadataConstants<false> constants;
        StageScales scales;
        scales.load_next(p, scaled_row, 0);
        u32 unreleased = 0;
        for (int stage = 0; stage < stages; ++stage) {
            scales.advance(p, scaled_row, stage);
            const u32 slot = wait_for_stage(ring, full, position);
#pragma unroll
            for (int chunk = 0; chunk < kStageChunks; ++chunk) {
                const u32 weights = slot + kXBytes + chunk * kWeightChunkBytes + row * kWeightRowBytes;
                const u32 masks = slot + kXBytes + kWeightBytes +
                                  (chunk / kMaskSpan * kBlockRows + row) * kMaskRowBytes +
                                  chunk % kMaskSpan * mask_bytes(64, kMasks);
                u32 words[4][2][Weight::kWords];
                MaskWords<kCount> bits[2];
                const auto load = [&] {
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
#pragma unroll
                        for (int source = 0; source < 4; ++source) {
                            const u32 at = weight_offset(row_in_8, (4 * source + q) * Weight::kBits / 2);
                            const u32 address = weights + half * (8 * kWeightRowBytes) + at;
                            Weight::load(words[source][half], address);
                        }
                        load_mask_words(bits[half], p, masks, mask_rows, half, q, row_in_8,
                                        stage * kStageChunks + chunk, pass);
                    }
                };
                if (kLoadEarly) load();
#pragma unroll
                for (int odd = 0; odd < 2; ++odd) {
                    wgmma_wait<1>();
                    if (chunk == 0 && odd == 1 && unreleased) release_stage(unreleased, lane);
                    if (!kLoadEarly && odd == 0) load();
                    // After this wait, the wgmmas that last read this fragment's registers have ended, so that the
                    // fragment can be written. The wgmmas that read the other fragment may still run. So each fragment
                    // is decoded separately, after its own wait.
                    SparseWeights weight;
#pragma unroll
                    for (int i = 0; i < 8; ++i) {
                        u32(&word)[Weight::kWords] = words[i / 2][i % 2];
                        if constexpr (kFormat != WeightFormat::dense) keep_in_register(word[0]);
                        u32 pair[2];
                        Weight::divide(pair[0], pair[1], word, scales.scale(i % 2));
                        weight.pair(i / 2, i % 2) = pair[odd];
                    }
                    const SparseMetadata<kCount> metadata(bits[0], bits[1], odd, constants);
                    multiply_sparse(weight, metadata, constants, slot + chunk * kTokens * 256 + odd * 64);
                }
            }
            unreleased = empty + 8 * position.slot;
            position.advance();
        }
        wgmma_wait<0>();
        release_stage(unreleased, lane);
    }

    // Multiplies the even or odd weights of both halves of a chunk with x. `x` is the address of the even or odd
    // columns of the first half.
    __device__ __forceinline__ void multiply_sparse(const SparseWeights& weight, const SparseMetadata<kCount>& metadata,
                                                    const MetadataConstants<false>& constants, u32 x) {
#pragma unroll
        for (int r = 0; r < 8; ++r) asm volatile("" ::"r"(weight.value[r / 4][r % 4]));
#pragma unroll
        for (int i = 0; i < kCount; ++i) asm volatile("" ::"r"(metadata.word[i]));
        wgmma_fence();
        multiply_half<0>(weight, metadata, constants, wgmma_descriptor(x));
        multiply_half<1>(weight, metadata, constants, wgmma_descriptor(x + kTokens * 128));
        wgmma_commit();
    }

    template <int kSelector>
    __device__ __forceinline__ void multiply_half(const SparseWeights& weight, const SparseMetadata<kCount>& metadata,
                                                  const MetadataConstants<false>& constants, u64 b) {
        using Product = Wgmma<kTokens, kType == kBfloat16>;
        if constexpr (kTotal)
            Product::template run_sparse<kSelector>(t, weight.value[kSelector], b, constants.select_all);
#pragma unroll
        for (int i = 0; i < kCount; ++i)
            Product::template run_sparse<kSelector>(f[i], weight.value[kSelector], b, metadata.word[i]);
    }

    // Multiplies the sums by the scales of their rows. `row` is the warp's first row.
    __device__ __forceinline__ void scale_rows(const Params& p, int row) {
        if constexpr (kFormat != WeightFormat::dense && !kScalesColumns<kFormat>) {
            const int g = threadIdx.x % 32 / 4;
            row += kSparse ? sparse_row(g) : g;
            const float scale[2] = {StoredWeight<kFormat, kType>::scale(p, row, 0),
                                    StoredWeight<kFormat, kType>::scale(p, row + 8, 0)};
#pragma unroll
            for (int c = 0; c < kColumns; ++c) {
                if constexpr (kTotal) t[c] *= scale[c % 4 / 2];
#pragma unroll
                for (int i = 0; i < kCount; ++i) f[i][c] *= scale[c % 4 / 2];
            }
        }
    }

    // Adds the terms of this warpgroup's masks to `sum`, in order, so that a result's bits do not depend on how masks
    // are divided. `row` is the token's row of the mask weights; it may be past the end if the token is not stored.
    __device__ __forceinline__ float add_terms(const Params& p, float sum, float total, int column, int row,
                                               int pass) const {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            const float gate = kSparse ? f[i][column] : 0.5f * (total - f[i][column]);
            const float value = kSparse ? total - gate : 0.5f * (total + f[i][column]);
            const bool weighted = kMaskWeightType >= 0 && row < p.tokens;
            const float mask_weight =
                weighted ? load_mask_weight<kMaskWeightType>(p, row, pass * kPassMasks + kFirst + i) : 1.0f;
            sum += mask_weight * (activate<kActivation, true>(gate) * value);
        }
        return sum;
    }
};

}  // namespace mglu
