// Decodes the formats of W. A weight is decoded once for all masks, right after it is loaded.
#pragma once
#include "element.cuh"
#include "params.cuh"
#include "weight_formats.cuh"

namespace mglu {

// The weights of one format, for x of type kType. A stored element holds kColumns neighbouring columns, and `decode`
// returns the number of one of them. The weight is that number times `scale`, which is the same for aligned groups of
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

    // The multiplication corrects the exponent bias, and makes subnormal numbers normal.
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

// kScalesColumns: each group of 128 columns of a row has a scale. kScalesRows: each row has one scale.
template <WeightFormat kFormat>
constexpr bool kScalesColumns = kFormat == WeightFormat::fp8_block || kFormat == WeightFormat::int4_group;
template <WeightFormat kFormat>
constexpr bool kScalesRows = kFormat != WeightFormat::dense && !kScalesColumns<kFormat>;

// Computes a * b + c for pairs of 16-bit elements.
template <int kType>
__device__ __forceinline__ u32 multiply_add(u32 a, u32 b, u32 c) {
    u32 result;
    if constexpr (kType == kBfloat16) asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
    else asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
    return result;
}

// Stands in for a scale if weights are decoded without their scales.
struct Unscaled {
    friend __device__ __forceinline__ float operator*(float weight, Unscaled) { return weight; }
};

template <typename Scale>
constexpr bool kIsUnscaled = false;
template <>
constexpr bool kIsUnscaled<Unscaled> = true;

// Multiplies a pair of elements of type kFrom by a scale, and converts the products to kTo.
template <int kFrom, int kTo, typename Scale>
__device__ __forceinline__ u32 convert_pair(u32 pair, Scale scale) {
    return from_floats<kTo>(to_float<kFrom>(pair & 0xffffu) * scale, to_float<kFrom>(pair >> 16) * scale);
}

// Decodes weights to pairs of 16-bit elements for tensor cores, with the first weight in the lower half. Weights are
// exact if they are decoded without scales, and rounded if they are multiplied by scales. Scale is float if groups of
// columns have scales, else Unscaled.
//
// - load: loads four neighbouring stored weights of a row from shared memory
// - divide: splits four loaded weights into the pairs of columns (0, 2) and (1, 3)
// - neighbours: returns a pair of neighbouring weights from 2 kBits bits
// - across: returns the pairs (A_2s, B_2s) and (A_2s+1, B_2s+1) of two octets (8 neighbouring weights) A and B
// - octet: returns the four pairs of an octet, in an order that suits the format
// - order_octet: puts 8 neighbouring x into the order of `octet`
template <WeightFormat kFormat, int kType>
struct WeightPairs;

template <int kType>
struct WeightPairs<WeightFormat::dense, kType> {
    static constexpr int kBits = 16, kWords = 2;

    static __device__ __forceinline__ void load(u32 (&word)[kWords], u32 address) { load_shared_words(word, address); }
    template <typename Scale = Unscaled>
    static __device__ __forceinline__ void divide(u32& even, u32& odd, const u32 (&word)[kWords], Scale scale = {}) {
        even = pick_bytes<0x5410>(word[0], word[1]);
        odd = pick_bytes<0x7632>(word[0], word[1]);
    }
    template <typename Scale = Unscaled>
    static __device__ __forceinline__ u32 neighbours(u32 bits, Scale scale = {}) {
        return bits;
    }
    template <typename Scale = Unscaled>
    static __device__ __forceinline__ void across(u32& first, u32& second, const u32* a, const u32* b, int s,
                                                  Scale scale = {}) {
        first = pick_bytes<0x5410>(a[s], b[s]);
        second = pick_bytes<0x7632>(a[s], b[s]);
    }
    static __device__ __forceinline__ void octet(u32 (&pair)[4], const u32 (&word)[4]) { order_octet(pair, word); }
    static __device__ __forceinline__ void order_octet(u32 (&pair)[4], const u32 (&word)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) pair[i] = word[i];
    }
};

// Formats of one byte per weight. `decode<kLow, kHigh>` turns the four bytes of a word into two pairs. kLow and kHigh
// select the bytes of the first and the second pair: each hex digit is the number of a byte, and the last digit comes
// first.
template <typename Bytes>
struct BytePairs {
    static constexpr int kBits = 8, kWords = 1;

    static __device__ __forceinline__ void load(u32 (&word)[kWords], u32 address) { load_shared_words(word, address); }
    template <typename Scale = Unscaled>
    static __device__ __forceinline__ void divide(u32& even, u32& odd, const u32 (&word)[kWords], Scale scale = {}) {
        Bytes::template decode<0x20, 0x31>(even, odd, word[0], scale);
    }
    template <typename Scale = Unscaled>
    static __device__ __forceinline__ u32 neighbours(u32 bits, Scale scale = {}) {
        u32 pair, unused;
        Bytes::template decode<0x10, 0x32>(pair, unused, bits, scale);
        return pair;
    }
    template <typename Scale = Unscaled>
    static __device__ __forceinline__ void across(u32& first, u32& second, const u32* a, const u32* b, int s,
                                                  Scale scale = {}) {
        const u32 word = __byte_perm(a[s / 2], b[s / 2], s % 2 ? 0x7362 : 0x5140);
        Bytes::template decode<0x10, 0x32>(first, second, word, scale);
    }
    static __device__ __forceinline__ void octet(u32 (&pair)[4], const u32 (&word)[2]) {
        Bytes::template decode<0x10, 0x32>(pair[0], pair[1], word[0], Unscaled{});
        Bytes::template decode<0x10, 0x32>(pair[2], pair[3], word[1], Unscaled{});
    }
    static __device__ __forceinline__ void order_octet(u32 (&pair)[4], const u32 (&word)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) pair[i] = word[i];
    }
};

template <int kType>
struct Fp8Pairs : BytePairs<Fp8Pairs<kType>> {
    template <u32 kLow, u32 kHigh, typename Scale>
    static __device__ __forceinline__ void decode(u32& low, u32& high, u32 word, Scale scale) {
        word = pick_bytes<kHigh << 8 | kLow>(word, 0);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
        // One instruction converts a pair to float16. To get bfloat16, float16 is converted through float32, which keeps
        // NaN.
        asm("{\n\t.reg .b16 first, second;\n\tmov.b32 {first, second}, %2;\n\tcvt.rn.f16x2.e4m3x2 %0, first;\n\t"
            "cvt.rn.f16x2.e4m3x2 %1, second;\n\t}"
            : "=r"(low), "=r"(high)
            : "r"(word));
        if constexpr (kType == kBfloat16 || !kIsUnscaled<Scale>) {
            low = convert_pair<kFloat16, kType>(low, scale);
            high = convert_pair<kFloat16, kType>(high, scale);
        }
#else
        low = from_floats<kType>(Fp8::decode(word & 0xffu, 0) * scale, Fp8::decode(word >> 8 & 0xffu, 0) * scale);
        high = from_floats<kType>(Fp8::decode(word >> 16 & 0xffu, 0) * scale, Fp8::decode(word >> 24, 0) * scale);
#endif
    }
};
template <int kType>
struct WeightPairs<WeightFormat::fp8_row, kType> : Fp8Pairs<kType> {};
template <int kType>
struct WeightPairs<WeightFormat::fp8_block, kType> : Fp8Pairs<kType> {};

// Converts int8 without a conversion instruction. The integer replaces the last bits of a floating-point number whose
// last bit has the value 1. Then the rest of that number is subtracted.
template <int kType>
struct WeightPairs<WeightFormat::int8_row, kType> : BytePairs<WeightPairs<WeightFormat::int8_row, kType>> {
    // The selector with which pick_bytes() fills two halves: a byte of the first word below a byte of the second.
    static __host__ __device__ constexpr u32 below(u32 bytes) { return 0x4040 | (bytes & 15) | (bytes & 0xf0) << 4; }

    template <u32 kLow, u32 kHigh, typename Scale>
    static __device__ __forceinline__ void decode(u32& low, u32& high, u32 word, Scale scale) {
        if constexpr (kType == kFloat16) {
            const u32 positive = word ^ 0x80808080u;                              // + 128
            low = subtract_1152(pick_bytes<below(kLow)>(positive, 0x64646464u));  // + 1024
            high = subtract_1152(pick_bytes<below(kHigh)>(positive, 0x64646464u));
        } else {
            low = without_offset(pick_bytes<below(kLow)>(word, 0x43434343u));
            high = without_offset(pick_bytes<below(kHigh)>(word, 0x43434343u));
        }
    }

    static __device__ __forceinline__ u32 subtract_1152(u32 pair) {
        return multiply_add<kType>(pair, 0x3c003c00u, 0xe480e480u);
    }
    // bfloat16 has 8 significant bits. The number is 128 + the last seven bits; 128 is subtracted, or 256 if the
    // integer is negative.
    static __device__ __forceinline__ u32 without_offset(u32 pair) {
        return multiply_add<kType>(pair & 0xff80ff80u, 0xbf80bf80u, pair & 0xff7fff7fu);
    }
};

template <int kType>
struct WeightPairs<WeightFormat::int4_group, kType> {
    static constexpr int kBits = 4, kWords = 1;

    static __device__ __forceinline__ void load(u32 (&word)[kWords], u32 address) {
        word[0] = load_shared_bits<16>(address);
    }
    template <typename Scale = Unscaled>
    static __device__ __forceinline__ void divide(u32& even, u32& odd, const u32 (&word)[kWords], Scale scale = {}) {
        decode(even, odd, pick_bytes<0x4140>(word[0], 0), scale);  // column 0 moves to bit 0, 1 to 4, 2 to 16, 3 to 20
    }
    template <typename Scale = Unscaled>
    static __device__ __forceinline__ u32 neighbours(u32 bits, Scale scale = {}) {
        u32 pair, unused;
        decode(pair, unused, bits | bits << 12, scale);
        return pair;
    }
    template <typename Scale = Unscaled>
    static __device__ __forceinline__ void across(u32& first, u32& second, const u32* a, const u32* b, int s,
                                                  Scale scale = {}) {
        decode(first, second, __byte_perm(*a, *b, 0x4400 + 0x1111 * s), scale);  // byte s of A, and of B
    }
    // The pairs are columns 0 and 4, 1 and 5, 2 and 6, 3 and 7.
    static __device__ __forceinline__ void octet(u32 (&pair)[4], const u32 (&word)[1]) {
        decode(pair[0], pair[1], word[0], Unscaled{});
        decode(pair[2], pair[3], word[0] >> 8, Unscaled{});
    }
    static __device__ __forceinline__ void order_octet(u32 (&pair)[4], const u32 (&word)[4]) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            pair[2 * i] = pick_bytes<0x5410>(word[i], word[i + 2]);
            pair[2 * i + 1] = pick_bytes<0x7632>(word[i], word[i + 2]);
        }
    }

    // Decodes the four-bit weights at bits 0 and 16 to `first`, and those at bits 4 and 20 to `second`. Other bits are
    // ignored.
    template <typename Scale>
    static __device__ __forceinline__ void decode(u32& first, u32& second, u32 word, Scale scale) {
        if constexpr (kType == kFloat16) {
            first = multiply_add<kType>(with_exponent<0x000f000fu>(word), 0x3c003c00u, 0xe408e408u);  // - 1032
            // The number is 1024 + 16 (w + 8). Multiply by 1 / 16 and subtract 72.
            second = multiply_add<kType>(with_exponent<0x00f000f0u>(word), 0x2c002c00u, 0xd480d480u);
        } else {
            first = multiply_add<kType>(with_exponent<0x000f000fu>(word), 0x3f803f80u, 0xc308c308u);  // - 136
            second = multiply_add<kType>(with_exponent<0x000f000fu>(word >> 4), 0x3f803f80u, 0xc308c308u);
        }
        if constexpr (!kIsUnscaled<Scale>) {
            if constexpr (kType == kBfloat16) {  // the scale is bfloat16 too
                const u32 scales = from_floats<kBfloat16>(scale, scale);
                first = multiply_add<kType>(first, scales, 0x80008000u);  // - 0
                second = multiply_add<kType>(second, scales, 0x80008000u);
            } else {
                first = convert_pair<kType, kType>(first, scale);
                second = convert_pair<kType, kType>(second, scale);
            }
        }
    }

    // Computes (word & kMask) | exponent in one LOP3. The compiler would use two instructions because of the two
    // constants.
    template <u32 kMask>
    static __device__ __forceinline__ u32 with_exponent(u32 word) {
        u32 result;
        asm("lop3.b32 %0, %1, %2, %3, 0xea;"
            : "=r"(result)
            : "r"(word), "r"(kMask), "r"(kType == kFloat16 ? 0x64006400u : 0x43004300u));
        return result;
    }
};

}  // namespace mglu
