// Divides matrices into groups of four or eight neighbouring columns of a row, one group per thread, for the
// elementwise kernels of a training step (training.md).
//
// With MGLU_VECTOR, all rows consist of whole groups and start at multiples of 16 bytes, and an instruction loads or
// stores 8 or 16 bytes. Otherwise groups are loaded and stored element by element, and a row's last group may have
// fewer columns (`count`).
#pragma once
#include "element.cuh"
#include "packed_masks.cuh"
#include "ptx.cuh"

namespace mglu {

constexpr int kThreads = 256;  // threads of a block
constexpr bool kVector = MGLU_VECTOR;
// The number of masks that a thread loads before it uses the first. With more masks it would need more registers, and
// fewer warps would fit on an SM.
constexpr int kMasksAtOnce = kVector ? 2 : 1;

// The position of this thread's group. Each warp takes 32 neighbouring groups of one row.
template <int kColumns>
struct Position {
    i64 row;
    int column;  // first column of the group
    int count;   // number of columns of the group; 0 for a thread past the end

    __device__ __forceinline__ Position(i64 rows, int columns) {
        const u32 warps_per_row = (static_cast<u32>(columns) + 32 * kColumns - 1) / (32 * kColumns);
        const u32 warp = blockIdx.x * (kThreads / 32) + threadIdx.x / 32;
        row = warp / warps_per_row;
        column = static_cast<int>((warp % warps_per_row * 32 + threadIdx.x % 32) * kColumns);
        count = row < rows && column < columns ? min(columns - column, kColumns) : 0;
    }
};

template <int kType, int kColumns>
struct Group {
    using Bits = typename Element<kType>::Bits;
    static constexpr int kPerWord = 4 / sizeof(Bits);
    static constexpr int kWords = kColumns / kPerWord;
    u32 word[kWords];

    __device__ __forceinline__ float operator[](int k) const {
        return to_float<kType>(static_cast<Bits>(word[k / kPerWord] >> (k % kPerWord * 16)));
    }
};

template <int kType, int kColumns>
__device__ __forceinline__ Group<kType, kColumns> rounded(const float (&value)[kColumns]) {
    Group<kType, kColumns> group;
#pragma unroll
    for (int w = 0; w < group.kWords; ++w) {
        if constexpr (kType == kFloat32) group.word[w] = from_float<kType>(value[w]);
        else group.word[w] = from_floats<kType>(value[2 * w], value[2 * w + 1]);
    }
    return group;
}

template <int kType, int kColumns>
__device__ __forceinline__ Group<kType, kColumns> load_group(const void* matrix, i64 offset, int count) {
    using Bits = typename Element<kType>::Bits;
    const Bits* from = static_cast<const Bits*>(matrix) + offset;
    Group<kType, kColumns> group;
    if constexpr (kVector) {
        constexpr int kAtOnce = group.kWords < 4 ? group.kWords : 4;
#pragma unroll
        for (int w = 0; w < group.kWords; w += kAtOnce) {
            u32 words[kAtOnce];
            load_global(words, reinterpret_cast<const u32*>(from) + w);
#pragma unroll
            for (int j = 0; j < kAtOnce; ++j) group.word[w + j] = words[j];
        }
    } else {
#pragma unroll
        for (int w = 0; w < group.kWords; ++w) group.word[w] = 0;
#pragma unroll
        for (int k = 0; k < kColumns; ++k)
            if (k < count) group.word[k / group.kPerWord] |= static_cast<u32>(from[k]) << (k % group.kPerWord * 16);
    }
    return group;
}

template <int kType, int kColumns>
__device__ __forceinline__ void store_group(void* matrix, i64 offset, const Group<kType, kColumns>& group, int count) {
    using Bits = typename Element<kType>::Bits;
    Bits* to = static_cast<Bits*>(matrix) + offset;
    if constexpr (kVector) {
        constexpr int kAtOnce = Group<kType, kColumns>::kWords < 4 ? Group<kType, kColumns>::kWords : 4;
#pragma unroll
        for (int w = 0; w < group.kWords; w += kAtOnce) {
            u32 words[kAtOnce];
#pragma unroll
            for (int j = 0; j < kAtOnce; ++j) words[j] = group.word[w + j];
            store_global(reinterpret_cast<u32*>(to) + w, words);
        }
    } else {
#pragma unroll
        for (int k = 0; k < kColumns; ++k)
            if (k < count) to[k] = static_cast<Bits>(group.word[k / group.kPerWord] >> (k % group.kPerWord * 16));
    }
}

// The bytes of kCount neighbouring masks for 8 columns of W. If kCount is a multiple of 4, they are aligned to 4 bytes.
template <int kCount>
struct OctetMasks {
    u32 word[(kCount + 3) / 4];

    __device__ __forceinline__ static OctetMasks load(const u8* from) {
        OctetMasks masks;
        if constexpr (kCount % 4 == 0) {
#pragma unroll
            for (int w = 0; w < kCount / 4; ++w) masks.word[w] = reinterpret_cast<const u32*>(from)[w];
        } else {
#pragma unroll
            for (int i = 0; i < kCount; ++i) {
                if (i % 4 == 0) masks.word[i / 4] = 0;
                masks.word[i / 4] |= static_cast<u32>(from[i]) << (i % 4 * 8);
            }
        }
        return masks;
    }

    // Multiplies the 8 columns with F_i, which is -1 where mask i is 1 and 1 elsewhere. Word w holds columns 2w and
    // 2w + 1. One shift moves their mask bits to bits 15 and 31, because `twice` repeats the byte 15 bits higher.
    template <int kType>
    __device__ __forceinline__ Group<kType, kOctet> flip(int i, const Group<kType, kOctet>& octet) const {
        static_assert(Group<kType, kOctet>::kPerWord == 2, "16-bit elements");
        const u32 byte = word[i / 4] >> (i % 4 * 8) & 0xffu;
        const u32 twice = byte | byte << 15;
        Group<kType, kOctet> flipped;
#pragma unroll
        for (int w = 0; w < octet.kWords; ++w) flipped.word[w] = flip_signs(octet.word[w], twice << (15 - 2 * w));
        return flipped;
    }

    // Multiplies the 8 columns with M_i: keeps the elements whose bit is 1, and clears the others.
    template <int kType>
    __device__ __forceinline__ Group<kType, kOctet> keep(int i, const Group<kType, kOctet>& octet) const {
        Group<kType, kOctet> signs, kept;
#pragma unroll
        for (int w = 0; w < octet.kWords; ++w) signs.word[w] = 0;
        signs = flip(i, signs);
#pragma unroll
        for (int w = 0; w < octet.kWords; ++w) kept.word[w] = octet.word[w] & (signs.word[w] >> 15) * 0xffffu;
        return kept;
    }
};

// Returns `whole` minus `part`. Each element of `part` is 0 or equals the element of `whole`, so XOR subtracts.
template <int kType, int kColumns>
__device__ __forceinline__ Group<kType, kColumns> without(const Group<kType, kColumns>& whole,
                                                          const Group<kType, kColumns>& part) {
    Group<kType, kColumns> rest;
#pragma unroll
    for (int w = 0; w < rest.kWords; ++w) rest.word[w] = whole.word[w] ^ part.word[w];
    return rest;
}

}  // namespace mglu
