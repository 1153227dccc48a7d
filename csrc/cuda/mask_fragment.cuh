// Mask bits as a lane of a tensor core's operand needs them: places of sparse products (decode_mma.cu, tile_wgmma.cu), or
// signs to flip (tile_wgmma.cu).
#pragma once
#include "ptx.cuh"

namespace mglu {

// Powers of two that the compiler does not know to be such. A shift and the LOP3 after it share a pipe, a product with a
// word of constant memory has another.
__constant__ u32 powers_of_two[16] = {1u << 0, 1u << 1, 1u << 2,  1u << 3,  1u << 4,  1u << 5,  1u << 6,  1u << 7,
                                      1u << 8, 1u << 9, 1u << 10, 1u << 11, 1u << 12, 1u << 13, 1u << 14, 1u << 15};

// Mask bytes of a row of W, each of 8 neighbouring columns, as the flips of two of them: bits 2q and 2q + 1 of a byte, for
// thread q of four, at bits 15 and 31 (the other bits are noise that flip_signs() drops). Two bytes share a word, so that two
// weights under a mask cost half a PRMT, one LOP3, and one and a half products, which are on another pipe.
template <int kBytes>
struct Flips {
    static constexpr int kWords = (kBytes + 3) / 4;
    u32 pair[2 * kWords];

    __device__ __forceinline__ Flips(const u32 (&bytes)[kWords], int q) {
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
            const u32 even = bytes[w] * (128u >> 2 * q);  // each at the highest bit of its byte
            const u32 odd = bytes[w] * (64u >> 2 * q);
            pair[2 * w] = pick_bytes<0x5410>(even, odd);
            pair[2 * w + 1] = pick_bytes<0x7632>(even, odd);
        }
    }

    __device__ __forceinline__ u32 of(int byte) const { return byte % 2 ? pair[byte / 2] : pair[byte / 2] * powers_of_two[8]; }
};

// The mask bytes of one row of W and two octets A and B of columns, 2 x kMasks bytes, contiguous in the packed format, as
// words (A_i, A_i+1, B_i, B_i+1).
template <int kMasks>
struct MaskWords {
    static constexpr int kWords = (kMasks + 1) / 2;
    u32 word[kWords];

    // Where a register holds weight j of A and of B (permute_x.cu), their flips under mask i: bit j of both bytes at bits 15 and
    // 31, which is a left shift, by 15 - j for the even masks and 7 - j for the odd ones; the other bits are noise. So two
    // weights under a mask cost one product and one LOP3.
    __device__ __forceinline__ u32 bits(int i, int j) const {
        const int distance = (i % 2 ? 7 : 15) - j;
        return distance == 0 ? word[i / 2] : word[i / 2] * powers_of_two[distance];
    }
};

// Places of values at x and at 0, in each four bits: 0 or 1 for the first, 2 or 3 for the second.
constexpr u32 kAllAtX = 0x88888888u;

// ~bits & even | all_at_x in one instruction: a LOP3 with two constants must find one of them in a register.
struct PlaceConstants {
    u32 even = 0x55555555u, all_at_x = kAllAtX;

    __device__ __forceinline__ PlaceConstants() { keep(even), keep(all_at_x); }

    __device__ __forceinline__ u32 places_of(u32 bits) const {
        u32 places;
        asm("lop3.b32 %0, %1, %2, %3, 0xae;" : "=r"(places) : "r"(bits), "r"(even), "r"(all_at_x));
        return places;
    }
};

// The mask bits that one lane gives a sparse product, for some masks: of its octets 2q and 2q + 1, rows g (top) and g + 8
// (bottom), those of the even weights or those of the odd ones.
template <int kMasks>
struct Places {
    u32 of[kMasks];

    __device__ __forceinline__ Places(const MaskWords<kMasks>& top, const MaskWords<kMasks>& bottom, int odd,
                                      const PlaceConstants& constants) {
#pragma unroll
        for (int i = 0; i < kMasks; ++i) {
            const u32 bits = i % 2 == 0 ? pick_bytes<0x6420>(top.word[i / 2], bottom.word[i / 2])
                                        : pick_bytes<0x7531>(top.word[i / 2], bottom.word[i / 2]);
            of[i] = constants.places_of(bits >> odd);
        }
    }
};

// The even weights, or the odd ones, of 16 rows and 64 columns as values of two sparse products. Product `pair` takes the
// octets 4 pair to 4 pair + 3, whose masks the lanes q = 2 pair and 2 pair + 1 have.
struct SparseWeights {
    u32 value[2][4];

    // Of row g + 8 half, out of the weights 4 (q % 2) to 4 (q % 2) + 3 of octet 2 source + q / 2.
    __device__ __forceinline__ void set(int source, int half, const u32 (&word)[2], int odd) {
        u32& pair_of_weights = value[source / 2][source % 2 * 2 + half];
        pair_of_weights = odd ? pick_bytes<0x7632>(word[0], word[1]) : pick_bytes<0x5410>(word[0], word[1]);
    }
};

// Reads an even number of bytes at a shared address, in the widest pieces that their number keeps aligned.
template <int kBytes>
__device__ __forceinline__ void load_mask_stream(u32 (&stream)[(kBytes + 3) / 4], u32 address) {
    if constexpr (kBytes % 16 == 0) {
#pragma unroll
        for (int i = 0; i < kBytes / 16; ++i) {
            const Vec16 v = load_shared_16(address + 16 * i);
#pragma unroll
            for (int j = 0; j < 4; ++j) stream[4 * i + j] = v.word[j];
        }
    } else if constexpr (kBytes % 8 == 0) {
#pragma unroll
        for (int i = 0; i < kBytes / 8; ++i)
            asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
                         : "=r"(stream[2 * i]), "=r"(stream[2 * i + 1])
                         : "r"(address + 8 * i)
                         : "memory");
    } else if constexpr (kBytes % 4 == 0) {
#pragma unroll
        for (int i = 0; i < kBytes / 4; ++i) stream[i] = load_shared_4(address + 4 * i);
    } else {
        u16 half[kBytes / 2 + 1] = {};
#pragma unroll
        for (int i = 0; i < kBytes / 2; ++i)
            asm volatile("ld.shared.u16 %0, [%1];" : "=h"(half[i]) : "r"(address + 2 * i) : "memory");
#pragma unroll
        for (int i = 0; i < (kBytes + 3) / 4; ++i)
            stream[i] = static_cast<u32>(half[2 * i]) | (static_cast<u32>(half[2 * i + 1]) << 16);
    }
}

template <int kMasks>
__device__ __forceinline__ MaskWords<kMasks> load_mask_words(u32 address) {
    constexpr int kStream = (2 * kMasks + 3) / 4;
    u32 stream[kStream];
    load_mask_stream<2 * kMasks>(stream, address);
    MaskWords<kMasks> masks;
#pragma unroll
    for (int w = 0; w < MaskWords<kMasks>::kWords; ++w) {
        const int a = 2 * w;           // byte of A under mask 2w; the next byte is mask 2w + 1
        const int b = kMasks + 2 * w;  // the same for B
        const u32 from_a = stream[a / 4] >> (8 * (a % 4));
        // B's two bytes straddle a word when kMasks is odd; with an odd kMasks the last word's second mask is noise.
        const u32 next = b / 4 + 1 < kStream ? stream[b / 4 + 1] : 0;
        const u32 from_b = b % 4 == 0 ? stream[b / 4] : __funnelshift_r(stream[b / 4], next, 8 * (b % 4));
        masks.word[w] = pick_bytes<0x5410>(from_a, from_b);
    }
    return masks;
}

}  // namespace mglu
