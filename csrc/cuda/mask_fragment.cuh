// Turns mask bits into what a lane of an MMA needs: metadata of sparse MMAs (decode_mma.cu, tile_wgmma.cu) or sign
// flips of weights (tile_wgmma.cu).
#pragma once
#include "ptx.cuh"

namespace mglu {

// Powers of two in constant memory, where the compiler does not see their values. Otherwise the compiler would turn the
// multiplications below into shifts. Shifts run on the same pipe as the LOP3 that follows; multiplications run on
// another pipe.
__constant__ u32 powers_of_two[16] = {1u << 0, 1u << 1, 1u << 2,  1u << 3,  1u << 4,  1u << 5,  1u << 6,  1u << 7,
                                      1u << 8, 1u << 9, 1u << 10, 1u << 11, 1u << 12, 1u << 13, 1u << 14, 1u << 15};

// Sign flips for x in its natural order. The input is mask bytes of a row of W, one for every 8 columns. Thread q of
// four needs bits 2q and 2q + 1 of each byte. flips(n) returns these two bits of byte n at bits 15 and 31; all other
// bits are noise, which flip_signs() ignores. Two bytes share a word, so two weights and a mask cost half a PRMT, one
// LOP3 and, on another pipe, one and a half multiplications.
template <int kBytes>
struct SignFlips {
    static constexpr int kWords = (kBytes + 3) / 4;
    u32 pair[2 * kWords];

    __device__ __forceinline__ SignFlips(const u32 (&bytes)[kWords], int q) {
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
            const u32 even = bytes[w] * (128u >> 2 * q);  // moves each bit to the top of its byte
            const u32 odd = bytes[w] * (64u >> 2 * q);
            pair[2 * w] = pick_bytes<0x5410>(even, odd);
            pair[2 * w + 1] = pick_bytes<0x7632>(even, odd);
        }
    }

    __device__ __forceinline__ u32 flips(int byte) const {
        return byte % 2 ? pair[byte / 2] : pair[byte / 2] * powers_of_two[8];
    }
};

// The mask bytes of two neighbouring octets A and B (of 8 columns) of a row of W. These 2 x kMasks bytes are contiguous
// in the packed format. Here they are rearranged into words (A_i, A_i+1, B_i, B_i+1), where A_i is mask i's byte of
// octet A.
template <int kMasks>
struct MaskWords {
    static constexpr int kWords = (kMasks + 1) / 2;
    u32 word[kWords];

    // Sign flips for permuted x (permute_x.cu), where a register holds weight j of A and weight j of B. flips(i, j)
    // moves bit j of mask i's two bytes to bits 15 and 31; the other bits are noise. A multiplication shifts the bits,
    // by 15 - j for even masks and 7 - j for odd ones, so two weights and a mask cost one multiplication and one LOP3.
    __device__ __forceinline__ u32 flips(int i, int j) const {
        const int distance = (i % 2 ? 7 : 15) - j;
        return distance == 0 ? word[i / 2] : word[i / 2] * powers_of_two[distance];
    }
};

// Metadata of a sparse MMA whose B has rows (x_k, 0, x_l, 0), or (0, x_k, 0, x_l) with kZeroFirst. Every four bits of
// metadata hold two row numbers: the first value is multiplied with row 0 or 1, the second with row 2 or 3.
// `select_all` selects x for all values, which is rows 0 and 2, or 1 and 3 with kZeroFirst.
//
// Mask bits become metadata in one LOP3: `~bits & even | select_all`, or with kZeroFirst `bits & even | select_all &
// ~even`. A LOP3 takes only one constant as an immediate, so this struct keeps its constants in registers.
template <bool kZeroFirst>
struct MetadataConstants {
    u32 even = 0x55555555u, select_all = kZeroFirst ? 0xddddddddu : 0x88888888u;

    __device__ __forceinline__ MetadataConstants() { keep_in_register(even), keep_in_register(select_all); }

    __device__ __forceinline__ u32 from_mask_bits(u32 bits) const {
        constexpr int kFunction = kZeroFirst ? 0xe2 : 0xae;
        u32 metadata;
        asm("lop3.b32 %0, %1, %2, %3, %4;" : "=r"(metadata) : "r"(bits), "r"(even), "r"(select_all), "n"(kFunction));
        return metadata;
    }
};

// The metadata that one lane supplies, a word for each mask. The words come from the mask bits of rows g (top) and g +
// 8 (bottom) in columns 16q to 16q + 15: the even columns with odd = 0, and the odd columns with odd = 1.
template <int kMasks>
struct SparseMetadata {
    u32 word[kMasks];

    template <bool kZeroFirst>
    __device__ __forceinline__ SparseMetadata(const MaskWords<kMasks>& top, const MaskWords<kMasks>& bottom, int odd,
                                              const MetadataConstants<kZeroFirst>& constants) {
#pragma unroll
        for (int i = 0; i < kMasks; ++i) {
            const u32 bits = i % 2 == 0 ? pick_bytes<0x6420>(top.word[i / 2], bottom.word[i / 2])
                                        : pick_bytes<0x7531>(top.word[i / 2], bottom.word[i / 2]);
            word[i] = constants.from_mask_bits(bits >> odd);
        }
    }
};

// The A operands of two sparse MMAs: the even or the odd weights of 16 rows and 64 columns. MMA number `half` takes
// columns 32 half to 32 half + 31. Its metadata selector is `half` too, since the lanes q = 2 half and 2 half + 1 hold
// the mask bits of these columns.
struct SparseWeights {
    u32 value[2][4];

    // Two values of row g + 8 * bottom: the even (or odd) ones of the 4 weights from column 16 source + 4 q on.
    __device__ __forceinline__ u32& pair(int source, int bottom) { return value[source / 2][source % 2 * 2 + bottom]; }
};

// Reads an even number of bytes from shared memory with the widest loads that this number keeps aligned.
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
        const int a = 2 * w;           // A's byte of mask 2w; the byte of mask 2w + 1 follows
        const int b = kMasks + 2 * w;  // B's byte of mask 2w
        const u32 from_a = stream[a / 4] >> (8 * (a % 4));
        // If kMasks is odd, B's two bytes may lie in different words, and the second mask of the last word is noise.
        const u32 next = b / 4 + 1 < kStream ? stream[b / 4 + 1] : 0;
        const u32 from_b = b % 4 == 0 ? stream[b / 4] : __funnelshift_r(stream[b / 4], next, 8 * (b % 4));
        masks.word[w] = pick_bytes<0x5410>(from_a, from_b);
    }
    return masks;
}

}  // namespace mglu
