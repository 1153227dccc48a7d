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

// Four neighbouring weights of a row as pairs of 16-bit elements for tensor cores, without their scales, which are
// exact: the even weights (columns 0 and 2) and the odd ones. `word` are the weights as they are stored.
template <WeightFormat kFormat, int kType>
struct WeightPairs;

template <int kType>
struct WeightPairs<WeightFormat::dense, kType> {
    static constexpr int kBits = 16;

    static __device__ __forceinline__ void decode(u32& even, u32& odd, const u32 (&word)[2]) {
        even = pick_bytes<0x5410>(word[0], word[1]);
        odd = pick_bytes<0x7632>(word[0], word[1]);
    }
};

template <int kType>
struct WeightPairs<WeightFormat::fp8_row, kType> {
    static constexpr int kBits = 8;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    // float16 by one instruction a pair, and bfloat16 from there by float32: there is no other conversion that keeps NaN.
    static __device__ __forceinline__ void decode(u32& even, u32& odd, const u32 (&word)[1]) {
        asm("{\n\t.reg .b16 low, high;\n\tmov.b32 {low, high}, %2;\n\tcvt.rn.f16x2.e4m3x2 %0, low;\n\t"
            "cvt.rn.f16x2.e4m3x2 %1, high;\n\t}"
            : "=r"(even), "=r"(odd)
            : "r"(pick_bytes<0x3120>(word[0], 0)));
        if constexpr (kType == kBfloat16) even = to_bfloat16(even), odd = to_bfloat16(odd);
    }

    static __device__ __forceinline__ u32 to_bfloat16(u32 pair) {
        return from_floats<kBfloat16>(to_float<kFloat16>(pair & 0xffffu), to_float<kFloat16>(pair >> 16));
    }
#else
    static __device__ __forceinline__ void decode(u32& even, u32& odd, const u32 (&word)[1]) {
        even = from_floats<kType>(Fp8::decode(word[0] & 0xffu, 0), Fp8::decode(word[0] >> 16 & 0xffu, 0));
        odd = from_floats<kType>(Fp8::decode(word[0] >> 8 & 0xffu, 0), Fp8::decode(word[0] >> 24, 0));
    }
#endif
};

template <int kType>
struct WeightPairs<WeightFormat::int8_row, kType> {
    static constexpr int kBits = 8;

    // The byte becomes the last bits of a number whose last bit has the value 1, from which the rest is subtracted. In
    // bfloat16, which has 8 significant bits, this is 128 + the last seven bits; the rest is 128 or 256.
    static __device__ __forceinline__ void decode(u32& even, u32& odd, const u32 (&word)[1]) {
        if constexpr (kType == kFloat16) {
            const u32 positive = word[0] ^ 0x80808080u;  // + 128
            even = add_1152_less(pick_bytes<0x4240>(positive, 0x64646464u));
            odd = add_1152_less(pick_bytes<0x4341>(positive, 0x64646464u));
        } else {
            even = last_seven_bits_less(pick_bytes<0x4240>(word[0], 0x43434343u));
            odd = last_seven_bits_less(pick_bytes<0x4341>(word[0], 0x43434343u));
        }
    }

    static __device__ __forceinline__ u32 add_1152_less(u32 pair) {
        u32 difference;
        asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(difference) : "r"(pair), "r"(0x64806480u));
        return difference;
    }
    static __device__ __forceinline__ u32 last_seven_bits_less(u32 pair) {
        u32 difference;
        asm("fma.rn.bf16x2 %0, %1, %2, %3;"
            : "=r"(difference)
            : "r"(pair & 0xff80ff80u), "r"(0xbf80bf80u), "r"(pair & 0xff7fff7fu));
        return difference;
    }
};

}  // namespace mglu
