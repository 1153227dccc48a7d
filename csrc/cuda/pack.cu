// Packs masks [n_masks, out_features, in_features] with any strides into the packed format (packed_masks.cuh). The
// source holds bool masks, one byte each, or logits, whose masks are `logit > 0`. blockIdx.y is the expert.
//
// The kernel is bound by one read of its input. A thread packs all masks of eight columns, so that neighbouring threads
// read neighbouring elements of each mask and write neighbouring bytes.
#include "element.cuh"
#include "packed_masks.cuh"
#include "ptx.cuh"

namespace mglu {

struct Params {
    const void* source;
    u8* packed;
    i64 mask_stride;  // in elements
    i64 row_stride;
    i64 column_stride;
    i64 expert_stride;
    int out_features;
    int in_features;
    int vector;  // 1 if rows are contiguous and start at multiples of 16 bytes (of 8 bytes for bool)
};

constexpr int kBool = 3;  // bool, one byte each, a source type that ElementType lacks
constexpr int kType = MGLU_ELEMENT;
constexpr int kMasks = MGLU_N_MASKS;
constexpr int kThreads = 256;

template <int type>
struct Source {
    using Bits = typename Element<type>::Bits;
    static __device__ __forceinline__ bool is_set(Bits bits) { return to_float<type>(bits) > 0.0f; }
};
template <>
struct Source<kBool> {
    using Bits = u8;
    static __device__ __forceinline__ bool is_set(Bits bits) { return bits != 0; }
};
using Bits = Source<kType>::Bits;

union Octet {
    Bits element[kOctet];
    u32 word[2 * sizeof(Bits)];
};

__device__ __forceinline__ void load(Octet& octet, const Bits* source) {
    if constexpr (sizeof(Bits) == 1) {
        asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
                     : "=r"(octet.word[0]), "=r"(octet.word[1])
                     : "l"(source));
    } else {
#pragma unroll
        for (int v = 0; v < static_cast<int>(sizeof(Bits)) / 2; ++v)
            asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(octet.word[4 * v]), "=r"(octet.word[4 * v + 1]), "=r"(octet.word[4 * v + 2]),
                           "=r"(octet.word[4 * v + 3])
                         : "l"(reinterpret_cast<const char*>(source) + 16 * v));
    }
}

}  // namespace mglu

extern "C" __global__ void __launch_bounds__(mglu::kThreads) mglu_pack(const __grid_constant__ mglu::Params p) {
    using namespace mglu;
    const i64 octets_per_row = packed_octets(p.in_features);
    const i64 octet_index = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
    const i64 octets_per_expert = octets_per_row * p.out_features;
    if (octet_index >= octets_per_expert) return;
    const i64 row = octet_index / octets_per_row;
    const int first = static_cast<int>(octet_index % octets_per_row) * kOctet;
    const Bits* source = static_cast<const Bits*>(p.source) + blockIdx.y * p.expert_stride + row * p.row_stride +
                         first * p.column_stride;

    Octet octets[kMasks];
    if (p.vector && first + kOctet <= p.in_features) {
#pragma unroll
        for (int i = 0; i < kMasks; ++i) load(octets[i], source + i * p.mask_stride);
    } else {
#pragma unroll
        for (int i = 0; i < kMasks; ++i)
#pragma unroll
            for (int k = 0; k < kOctet; ++k)
                octets[i].element[k] =
                    first + k < p.in_features ? source[i * p.mask_stride + k * p.column_stride] : Bits(0);
    }
    u8 bytes[kMasks];
#pragma unroll
    for (int i = 0; i < kMasks; ++i) {
        u32 bits = 0;
#pragma unroll
        for (int k = 0; k < kOctet; ++k) bits |= as_mask_bit(Source<kType>::is_set(octets[i].element[k]), k);
        bytes[i] = static_cast<u8>(bits);
    }
    u8* out = p.packed + (blockIdx.y * octets_per_expert + octet_index) * kMasks;
    if constexpr (kMasks % 4 == 0) {  // `out` is aligned to words of 4 bytes
#pragma unroll
        for (int w = 0; w < kMasks / 4; ++w)
            reinterpret_cast<u32*>(out)[w] = bytes[4 * w] | bytes[4 * w + 1] << 8 | bytes[4 * w + 2] << 16 |
                                             static_cast<u32>(bytes[4 * w + 3]) << 24;
    } else {
#pragma unroll
        for (int i = 0; i < kMasks; ++i) out[i] = bytes[i];
    }
}
