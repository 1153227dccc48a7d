// How the formats of W are decoded, once for all masks, where W leaves memory.
#pragma once
#include "element.cuh"
#include "params.cuh"
#include "weight_formats.cuh"

namespace mglu {

// The weights of one format, for x of type kType. `decode` gives the number that is stored for one of the kColumns
// neighbouring columns of an element. A weight is that number times `scale`, which is the same for aligned groups of
// kScaledTogether columns.
template <WeightFormat kFormat, int kType>
struct StoredWeight;

struct WithoutScales {
    static constexpr int kColumns = 1;

    static __device__ __forceinline__ float scale(const Params&, i64, int) { return 1.0f; }
};

struct WithRowScales {
    static constexpr int kColumns = 1;

    static __device__ __forceinline__ float scale(const Params& p, i64 row, int) {
        return static_cast<const float*>(p.weight_scale)[row];
    }
};

struct Fp8 {
    using Bits = u8;

    // The product rebases the exponent, and turns subnormal numbers into normal ones.
    static __device__ __forceinline__ float decode(Bits bits, int) {
        const u32 sign = static_cast<u32>(bits & 0x80) << 24, magnitude = bits & 0x7f;
        if (magnitude == 0x7f) return __uint_as_float(0x7fc00000u);
        return __uint_as_float(sign | magnitude << 20) * 0x1p120f;
    }
};

template <int kType>
struct StoredWeight<WeightFormat::dense, kType> : WithoutScales {
    using Bits = typename Element<kType>::Bits;

    static __device__ __forceinline__ float decode(Bits bits, int) { return to_float<kType>(bits); }
};

template <int kType>
struct StoredWeight<WeightFormat::fp8_row, kType> : Fp8, WithRowScales {};

template <int kType>
struct StoredWeight<WeightFormat::fp8_block, kType> : Fp8 {
    static constexpr int kColumns = 1;

    static __device__ __forceinline__ float scale(const Params& p, i64 row, int k) {
        const i64 groups = (p.in_features + kScaledTogether - 1) / kScaledTogether;
        return static_cast<const float*>(p.weight_scale)[row / kScaledTogether * groups + k / kScaledTogether];
    }
};

template <int kType>
struct StoredWeight<WeightFormat::int8_row, kType> : WithRowScales {
    using Bits = u8;

    static __device__ __forceinline__ float decode(Bits bits, int) { return static_cast<signed char>(bits); }
};

template <int kType>
struct StoredWeight<WeightFormat::int4_group, kType> {
    using Bits = u8;
    static constexpr int kColumns = 2;

    static __device__ __forceinline__ float decode(Bits bits, int column) {
        return static_cast<int>(bits >> 4 * column & 15) - 8;
    }
    static __device__ __forceinline__ float scale(const Params& p, i64 row, int k) {
        const i64 groups = (p.in_features + kScaledTogether - 1) / kScaledTogether;
        return to_float<kBfloat16>(static_cast<const u16*>(p.weight_scale)[row * groups + k / kScaledTogether]);
    }
};

// Whether scales belong to columns (and rows) of W, and not to whole rows.
template <WeightFormat kFormat>
constexpr bool kScalesColumns = kFormat == WeightFormat::fp8_block || kFormat == WeightFormat::int4_group;

// Four neighbouring weights of a row, read from shared memory, as pairs of 16-bit elements for tensor cores: the even
// weights (columns 0 and 2) and the odd ones, without their scales. They are exact.
template <WeightFormat kFormat, int kType>
struct WeightPairs;

template <int kType>
struct WeightPairs<WeightFormat::dense, kType> {
    static constexpr int kBits = 16;

    static __device__ __forceinline__ void load(u32& even, u32& odd, u32 address) {
        u32 word[2];
        load_shared_words(word, address);
        even = pick_bytes<0x5410>(word[0], word[1]);
        odd = pick_bytes<0x7632>(word[0], word[1]);
    }
};

template <int kType>
struct Fp8Pairs {
    static constexpr int kBits = 8;

    static __device__ __forceinline__ void load(u32& even, u32& odd, u32 address) {
        const u32 word = load_shared_4(address);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
        // float16 by one conversion a pair, and bfloat16 from there by float32: no other way keeps NaN.
        asm("{\n\t.reg .b16 low, high;\n\tmov.b32 {low, high}, %2;\n\tcvt.rn.f16x2.e4m3x2 %0, low;\n\t"
            "cvt.rn.f16x2.e4m3x2 %1, high;\n\t}"
            : "=r"(even), "=r"(odd)
            : "r"(pick_bytes<0x3120>(word, 0)));
        if constexpr (kType == kBfloat16) even = to_bfloat16(even), odd = to_bfloat16(odd);
#else
        even = from_floats<kType>(Fp8::decode(word & 0xffu, 0), Fp8::decode(word >> 16 & 0xffu, 0));
        odd = from_floats<kType>(Fp8::decode(word >> 8 & 0xffu, 0), Fp8::decode(word >> 24, 0));
#endif
    }

    static __device__ __forceinline__ u32 to_bfloat16(u32 pair) {
        return from_floats<kBfloat16>(to_float<kFloat16>(pair & 0xffffu), to_float<kFloat16>(pair >> 16));
    }
};
template <int kType>
struct WeightPairs<WeightFormat::fp8_row, kType> : Fp8Pairs<kType> {};
template <int kType>
struct WeightPairs<WeightFormat::fp8_block, kType> : Fp8Pairs<kType> {};

// a * b + c of two pairs of 16-bit elements.
template <int kType>
__device__ __forceinline__ u32 multiply_add(u32 a, u32 b, u32 c) {
    u32 result;
    if constexpr (kType == kBfloat16) asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
    else asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
    return result;
}

// An integer becomes the last bits of a number whose last bit has the value 1; what it is too large by is subtracted.
template <int kType>
struct WeightPairs<WeightFormat::int8_row, kType> {
    static constexpr int kBits = 8;

    static __device__ __forceinline__ void load(u32& even, u32& odd, u32 address) {
        const u32 word = load_shared_4(address);
        if constexpr (kType == kFloat16) {
            const u32 positive = word ^ 0x80808080u;           // + 128
            even = pick_bytes<0x4240>(positive, 0x64646464u);  // + 1024
            odd = pick_bytes<0x4341>(positive, 0x64646464u);
            even = multiply_add<kType>(even, 0x3c003c00u, 0xe480e480u);  // * 1 - 1152
            odd = multiply_add<kType>(odd, 0x3c003c00u, 0xe480e480u);
        } else {
            even = without_offset(pick_bytes<0x4240>(word, 0x43434343u));
            odd = without_offset(pick_bytes<0x4341>(word, 0x43434343u));
        }
    }

    // bfloat16 has 8 significant bits: 128 + the last seven bits, less 128, or less 256 for a negative number.
    static __device__ __forceinline__ u32 without_offset(u32 pair) {
        return multiply_add<kType>(pair & 0xff80ff80u, 0xbf80bf80u, pair & 0xff7fff7fu);
    }
};

template <int kType>
struct WeightPairs<WeightFormat::int4_group, kType> {
    static constexpr int kBits = 4;

    static __device__ __forceinline__ void load(u32& even, u32& odd, u32 address) {
        u16 bits;
        asm volatile("ld.shared.u16 %0, [%1];" : "=h"(bits) : "r"(address) : "memory");
        const u32 word = pick_bytes<0x4140>(bits, 0);  // column 0 at bit 0, 1 at 4, 2 at 16, 3 at 20
        if constexpr (kType == kFloat16) {
            even = multiply_add<kType>((word & 0x000f000fu) | 0x64006400u, 0x3c003c00u, 0xe408e408u);  // - 1032
            // Here the number is 1024 + 16 (w + 8): times 1 / 16, less 72.
            odd = multiply_add<kType>((word & 0x00f000f0u) | 0x64006400u, 0x2c002c00u, 0xd480d480u);
        } else {
            even = multiply_add<kType>((word & 0x000f000fu) | 0x43004300u, 0x3f803f80u, 0xc308c308u);  // - 136
            odd = multiply_add<kType>((word >> 4 & 0x000f000fu) | 0x43004300u, 0x3f803f80u, 0xc308c308u);
        }
    }
};

}  // namespace mglu
