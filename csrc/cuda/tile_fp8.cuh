// The mainloop of tile_wgmma.cu if x and W are multiplied in fp8.
//
// quantize_x.cu has rounded x to float8_e4m3fn and permuted its columns. W is stored in the same type. Masks flip the
// signs of its bytes. A chunk has 128 columns, which share a scale in `fp8_block`. A lane holds columns 32q to 32q + 31
// of two rows. Register j holds columns j, 8 + j, 16 + j and 24 + j of these 32, so that one shift moves their mask
// bits to the sign bits of the four bytes.
//
// wgmma keeps only about 14 bits when it adds fp8 products. So each chunk has its own sums, which are added in float32.
// t and the masks' products are computed one after the other, in one set of registers (tile_wgmma.md).
#pragma once
#include "tile_mainloop.cuh"

namespace mglu {

constexpr int kChunkSteps = 4;             // wgmmas of 32 columns in a chunk
using Fp8Fragments = u32[kChunkSteps][4];  // the A operands of a chunk's wgmmas

// Loads a lane's 32 bytes of a row of W, and transposes them: byte b of register j is byte 8b + j.
__device__ __forceinline__ void load_octets(u32 (&registers)[8], u32 row, int g, int q) {
    u32 word[8];
#pragma unroll
    for (int v = 0; v < 2; ++v) {
        const Vec16 vector = load_shared_16(row + weight_offset(g, (2 * q + v) * 16));
#pragma unroll
        for (int w = 0; w < 4; ++w) word[4 * v + w] = vector.word[w];
    }
#pragma unroll
    for (int part = 0; part < 2; ++part) {
        const u32 a = word[part], b = word[2 + part], c = word[4 + part], d = word[6 + part];
        const u32 ab_low = pick_bytes<0x5140>(a, b), cd_low = pick_bytes<0x5140>(c, d);
        const u32 ab_high = pick_bytes<0x7362>(a, b), cd_high = pick_bytes<0x7362>(c, d);
        registers[4 * part] = pick_bytes<0x5410>(ab_low, cd_low);
        registers[4 * part + 1] = pick_bytes<0x7632>(ab_low, cd_low);
        registers[4 * part + 2] = pick_bytes<0x5410>(ab_high, cd_high);
        registers[4 * part + 3] = pick_bytes<0x7632>(ab_high, cd_high);
    }
}

// Loads the mask bits of a lane's 32 columns of a row: a word for each mask, with the first column in the lowest bit.
template <int kFirst, int kCount>
__device__ __forceinline__ void load_octet_masks(u32 (&bits)[kCount], u32 address) {
    u32 stream[kMasks];
    load_mask_stream<4 * kMasks>(stream, address);
    const auto two = [&](int a, int b) { return __byte_perm(stream[a / 4], stream[b / 4], (4 + b % 4) << 4 | a % 4); };
#pragma unroll
    for (int m = 0; m < kCount; ++m) {
        const int i = kFirst + m;
        if constexpr (kMasks == 1) bits[m] = stream[0];
        else bits[m] = pick_bytes<0x5410>(two(i, kMasks + i), two(2 * kMasks + i, 3 * kMasks + i));
    }
}

// Reads the words of load_octet_masks() from global memory, for masks whose rows are not aligned for TMA. Bytes past
// the end of a row are not read.
template <int kFirst, int kCount>
__device__ __forceinline__ void read_octet_masks(u32 (&bits)[kCount], const u8* row, int octet, int octets) {
#pragma unroll
    for (int m = 0; m < kCount; ++m) {
        bits[m] = 0;
#pragma unroll
        for (int o = 0; o < 4; ++o)
            if (octet + o < octets)
                bits[m] |= static_cast<u32>(row[static_cast<i64>(octet + o) * kMasks + kFirst + m]) << 8 * o;
    }
}

// Multiplies a chunk with the x of descriptor b and adds the products to `sums`. If groups of columns have scales, the
// products are multiplied by the scales of the lane's two rows.
__device__ __forceinline__ void add_products(float (&sums)[kColumns], const Fp8Fragments& fragments, u64 b,
                                             const float (&scale)[2]) {
    float partial[kColumns];
#pragma unroll
    for (int s = 0; s < kChunkSteps; ++s)
#pragma unroll
        for (int r = 0; r < 4; ++r) asm volatile("" ::"r"(fragments[s][r]));
    wgmma_fence();
    Fp8Wgmma<kTokens>::template run<false>(partial, fragments[0], b);
#pragma unroll
    for (int s = 1; s < kChunkSteps; ++s) Fp8Wgmma<kTokens>::template run<true>(partial, fragments[s], b + 2 * s);
    wgmma_commit();
    wgmma_wait<0>();
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
        asm volatile("" : "+f"(partial[c]));  // keeps the compiler from reading the sum before the wait
        sums[c] = kScalesColumns<kFormat> ? fmaf(partial[c], scale[c % 4 / 2], sums[c]) : sums[c] + partial[c];
    }
}

// Accumulates all products of a tile over k, and multiplies them by the scales of the tokens.
template <bool kTotal, int kFirst, int kCount>
__device__ __forceinline__ void accumulate_fp8(Accumulators<kTotal, kFirst, kCount>& sums, const Params& p, u32 ring,
                                               u32 full, u32 empty, const LaunchTile& tile, int warpgroup_row,
                                               RingPosition& position) {
    const int lane = threadIdx.x % 32;
    const int g = lane / 4;
    const int q = lane % 4;
    const int row = warpgroup_row + threadIdx.x / 32 % 4 * 16 + g;  // the lane holds this row and row + 8
    const int stages = stage_count(p);
    const u8* mask_rows = p.packed_masks + (tile.stored_row(p) + row) * p.mask_row_stride;
    for (int stage = 0; stage < stages; ++stage) {
        const u32 slot = wait_for_stage(ring, full, position);
        const int column = stage * kChunkColumns;
        Fp8Fragments fragments;
        u32 bits[2][kCount];
        float scale[2] = {1.0f, 1.0f};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if constexpr (kScalesColumns<kFormat>)
                scale[half] = StoredWeight<kFormat, kType>::scale(p, tile.scaled_row(p) + row + 8 * half, column);
            u32 registers[8];
            load_octets(registers, slot + kXBytes + (row + 8 * half) * kWeightRowBytes, g, q);
#pragma unroll
            for (int j = 0; j < 8; ++j) fragments[j / 2][j % 2 * 2 + half] = registers[j];
            const u32 masks = slot + kXBytes + kWeightBytes + (row + 8 * half) * kMaskRowBytes;
            if constexpr (kBulkMasks) load_octet_masks<kFirst>(bits[half], masks + 4 * q * kMasks);
            else
                read_octet_masks<kFirst>(bits[half], mask_rows + 8 * half * p.mask_row_stride, column / kOctet + 4 * q,
                                         p.in_features / kOctet);
        }
        const u64 b = wgmma_descriptor(slot);
        if constexpr (kTotal) add_products(sums.t, fragments, b, scale);
#pragma unroll
        for (int m = 0; m < kCount; ++m) {
            // The fragments have the signs of mask m - 1. Flip the signs at which masks m - 1 and m differ.
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const u32 flips = m == 0 ? bits[half][0] : bits[half][m] ^ bits[half][m - 1];
#pragma unroll
                for (int j = 0; j < 8; ++j)
                    fragments[j / 2][j % 2 * 2 + half] ^= (j == 7 ? flips : flips * powers_of_two[7 - j]) & 0x80808080u;
            }
            add_products(sums.f[m], fragments, b, scale);
        }
        release_stage(empty + 8 * position.slot, lane);
        position.advance();
    }
    // The scales of tokens follow the copy of x in memory.
    const int copied = kTiledX ? (p.tokens + kTokens - 1) / kTokens : p.tokens;  // tiles or tokens of the copy
    constexpr int kBytes = kTiledX ? kXBytes : kChunkColumns;                    // bytes of a tile or token in a stage
    const void* copy_end = static_cast<const u8*>(p.x) + static_cast<i64>(copied) * stages * kBytes;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
        const int token = tile.first_token() + c / 4 * 8 + 2 * q + c % 2;
        const float scale = token < p.tokens ? static_cast<const float*>(copy_end)[token] : 0.0f;
        if constexpr (kTotal) sums.t[c] *= scale;
#pragma unroll
        for (int m = 0; m < kCount; ++m) sums.f[m][c] *= scale;
    }
}

}  // namespace mglu
