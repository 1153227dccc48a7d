// Rounds x to float8_e4m3fn, each token with its own scale.
//
// The scale of a token is the smallest power of two, not below 2^-126, that brings its largest magnitude to at most 448,
// the largest number of the type. It is 1 for zeros, and NaN where x is not finite (mglu_ops/formats.py). A block takes
// one token, and a thread 8 columns at a time.
//
// With kTokens > 0 the copy is for tile_wgmma.cu (tile_fp8.cuh): [tile of kTokens tokens][chunk of 128 columns][token]
// [128], with zeros past the last token and the end of k, then the scales of the tokens in float32. Two permutations
// apply to the 128 columns of a token and chunk. First, seen as a 16x8 matrix, they are transposed: column 8 o + j goes
// to 16 j + o. Second, the 16-byte vector v of token n goes to v ^ (n % 8), the 128-byte swizzle that wgmma expects of
// its B operand. Such a launch needs in_features % 8 == 0.
//
// For experts (MGLU_ITEMS) the tokens are places, in whose order x is gathered. There kTokens = 1, so that the copy is
// [place][chunk of 128 columns][128] with the first permutation only, from which TMA loads the tokens of an item.
//
// With kTokens = 0 the copy is [tokens][in_features] in x's type: the rounded numbers times their scales, at most the
// largest finite number of the type.
#include "element.cuh"
#include "params.cuh"
#include "ptx.cuh"
#include "work.cuh"

namespace mglu {

constexpr int kType = MGLU_ELEMENT;
constexpr int kTokens = MGLU_TOKEN_COLUMNS;
constexpr int kThreads = 256;
constexpr int kOctets = 16;  // groups of 8 columns of a chunk
using Bits = Element<kType>::Bits;
constexpr Bits kLargest = kType == kFloat16 ? 0x7bff : kType == kBfloat16 ? 0x7f7f : 0x7f7fffff;

// Columns 8 octet to 8 octet + 7 of a token in row `row` of x, zeros past the end.
__device__ __forceinline__ void load_octet(float (&x)[8], const Params& p, int token, int row, int octet) {
    const Bits* from = static_cast<const Bits*>(p.x) + row * p.x_row_stride + 8 * octet * p.x_column_stride;
    const int count = token < p.tokens ? min(p.in_features - 8 * octet, 8) : 0;
    if (p.x_is_vectorizable && count == 8) {
        constexpr int kPerWord = 4 / sizeof(Bits);
#pragma unroll
        for (int first = 0; first < 8; first += 4 * kPerWord) {
            u32 words[4];
            load_global(words, from + first);
#pragma unroll
            for (int k = 0; k < 4 * kPerWord; ++k)
                x[first + k] = to_float<kType>(static_cast<Bits>(words[k / kPerWord] >> k % kPerWord * 16));
        }
    } else {
#pragma unroll
        for (int k = 0; k < 8; ++k) x[k] = k < count ? to_float<kType>(from[k * p.x_column_stride]) : 0.0f;
    }
}

// Four numbers of magnitude up to 448 in fp8. Only tile_wgmma's architecture has to have the instruction.
__device__ __forceinline__ u32 in_fp8(const float* x, float factor) {
    u32 result = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    asm("{\n\t.reg .b16 low, high;\n\tcvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n\t"
        "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n\tmov.b32 %0, {low, high};\n\t}"
        : "=r"(result)
        : "f"(x[0] * factor), "f"(x[1] * factor), "f"(x[2] * factor), "f"(x[3] * factor));
#endif
    return result;
}

// The number of fp8 that is nearest to x, of magnitude up to 448: a sum with 1.5 times 2^23 units of its last digit is
// rounded to that digit.
__device__ __forceinline__ float rounded_to_fp8(float x) {
    const u32 exponent = max(__float_as_uint(x) & 0x7f800000u, 121u << 23);  // 2^-6, the least of a normal number
    const float large = 1.5f * __uint_as_float(exponent + (20u << 23));
    return (x + large) - large;
}

// Of the 4x4 bytes of four neighbouring lanes, a word each, lane r gets the bytes r of all.
__device__ __forceinline__ u32 transpose_among_4(u32 word, int r) {
    const u32 neighbour = __shfl_xor_sync(~0u, word, 1);
    const u32 even = r % 2 ? neighbour : word, odd = r % 2 ? word : neighbour;
    const u32 low = pick_bytes<0x5140>(even, odd), high = pick_bytes<0x7362>(even, odd);
    const u32 other = __shfl_xor_sync(~0u, r < 2 ? high : low, 2);
    return __byte_perm(r < 2 ? low : other, r < 2 ? other : high, r % 2 ? 0x7632 : 0x5410);
}

}  // namespace mglu

extern "C" __global__ void __launch_bounds__(256)
    mglu_quantize_x(const __grid_constant__ mglu::Params p MGLU_ITEM_PARAMS) {
    using namespace mglu;
    wait_for_earlier_kernels();
    let_next_kernel_start();
    const int token = blockIdx.x;
#if MGLU_ITEMS
    const int row_of_x = row_of_x_at(items, token);
#else
    const int row_of_x = token;
#endif
    const int chunks = (p.in_features + 127) / 128;
    __shared__ u32 greatest_of[kThreads / 32];

    // Magnitudes compare like the integers of their bits, and NaN is the largest.
    u32 greatest = 0;
#pragma unroll 4
    for (int octet = threadIdx.x; octet < chunks * kOctets; octet += kThreads) {
        float x[8];
        load_octet(x, p, token, row_of_x, octet);
#pragma unroll
        for (int k = 0; k < 8; ++k) greatest = max(greatest, __float_as_uint(x[k]) & 0x7fffffffu);
    }
    greatest = __reduce_max_sync(~0u, greatest);
    if (threadIdx.x % 32 == 0) greatest_of[threadIdx.x / 32] = greatest;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < kThreads / 32; ++w) greatest = max(greatest, greatest_of[w]);

    // 448 is 1.75 times 2^8: a larger fraction needs the next power of two.
    const int exponent = static_cast<int>(greatest >> 23) - 8 + ((greatest & 0x7fffffu) > 0x600000u);
    const bool finite = greatest < 0x7f800000u;
    const u32 power = greatest == 0 ? 127u << 23 : static_cast<u32>(max(exponent, 1)) << 23;
    const float scale = __uint_as_float(finite ? power : 0x7fc00000u);
    const float factor = __uint_as_float(0x7f000000u - power);  // 1 / scale

    const i64 tile = kTokens > 0 ? token / max(kTokens, 1) : 0;
    const int row = kTokens > 0 ? token % max(kTokens, 1) : token;
    if (kTokens > 0 && threadIdx.x == 0) {
        float* scales = reinterpret_cast<float*>(static_cast<u8*>(p.out) + static_cast<i64>(gridDim.x) * chunks * 128);
        scales[token] = scale;
    }
#pragma unroll 2
    for (int first = 0; first < chunks * kOctets; first += kThreads) {
        const int octet = first + threadIdx.x;
        float x[8];
        load_octet(x, p, token, row_of_x, octet);
        if constexpr (kTokens > 0) {
            const int r = threadIdx.x % 4;
            u32 word[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) word[half] = transpose_among_4(in_fp8(x + 4 * half, factor), r);
            if (octet >= chunks * kOctets) break;
            u8* to = static_cast<u8*>(p.out) + ((tile * chunks + octet / kOctets) * kTokens + row) * 128 +
                     octet % kOctets / 4 * 4;
#pragma unroll
            for (int half = 0; half < 2; ++half)
                *reinterpret_cast<u32*>(to + ((4 * half + r) ^ row % 8) * 16) = word[half];
        } else {
            Bits* to = static_cast<Bits*>(p.out) + static_cast<i64>(row) * p.in_features + 8 * octet;
            const float largest = to_float<kType>(kLargest);
#pragma unroll
            for (int k = 0; k < 8; ++k) {
                const float value = rounded_to_fp8(x[k] * factor) * scale;
                // A comparison with NaN is false, so NaN stays.
                if (8 * octet + k < p.in_features)
                    to[k] = from_float<kType>(value > largest ? largest : value < -largest ? -largest : value);
            }
        }
    }
}
