// Rounds x to float8_e4m3fn, each token with its own scale.
//
// The numbers of a token are divided by its scale, the smallest power of two from 2^-126 on that brings the largest
// magnitude to at most 448, the largest number of the type. The scale is 1 if the token is all zeros, and NaN if a
// number of the token is not finite (mglu_ops/formats.py). A block takes one token, and a thread 8 columns at a time.
//
// With kTokens > 0 the kernel writes a copy for tile_wgmma.cu (tile_fp8.cuh): [tile of kTokens tokens]
// [chunk of 128 columns][token][128], with zeros past the last token and the end of k, followed by the scales of the
// tokens in float32. Two permutations apply to the 128 columns of a token and chunk. First, they are transposed as a
// 16x8 matrix: column 8 o + j goes to 16 j + o. Second, the 16-byte vector v of token n goes to v ^ (n % 8), the
// 128-byte swizzle that wgmma expects of its B operand. Such a launch needs in_features % 8 == 0.
//
// For experts (MGLU_ITEMS) kTokens is 1, and the copy holds the rows of x sorted by expert, from which TMA loads the
// rows of an item: [row][chunk of 128 columns][128], with the first permutation only.
//
// With kTokens = 0 the kernel writes [tokens][in_features] in x's type: the rounded numbers times their scales, clamped
// to the finite numbers of the type.
#include "element.cuh"
#include "params.cuh"
#include "ptx.cuh"
#include "work.cuh"

namespace mglu {

constexpr int kType = MGLU_ELEMENT;
constexpr int kTokens = MGLU_TOKEN_COLUMNS;
constexpr int kThreads = 256;
constexpr int kOctets = 16;  // octets (8 columns) of a chunk
using Bits = Element<kType>::Bits;
constexpr Bits kLargest = kType == kFloat16 ? 0x7bff : kType == kBfloat16 ? 0x7f7f : 0x7f7fffff;

// Loads 8 columns of a token, which is row `row` of x. Columns past the end are zero.
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

// Multiplies four numbers by `factor`, and converts the products, of magnitude up to 448, to fp8. Only tile_wgmma, on
// Hopper, needs this function, so older architectures may lack its instruction.
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

// Rounds x, of magnitude up to 448, to the nearest number of fp8. Adding a number that is 1.5 * 2^23 times the value of
// fp8's last digit makes float32 round at that digit. Below 2^-6, where fp8 is subnormal, the value of that digit is
// constant.
__device__ __forceinline__ float rounded_to_fp8(float x) {
    const u32 exponent = max(__float_as_uint(x) & 0x7f800000u, 121u << 23);  // 2^-6
    const float large = 1.5f * __uint_as_float(exponent + (20u << 23));
    return (x + large) - large;
}

// Transposes the 4x4 bytes of four neighbouring lanes, which hold a word each: lane r gets byte r of each lane.
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
    const int x_row = x_row_at(items, token);
#else
    const int x_row = token;
#endif
    const int chunks = (p.in_features + 127) / 128;
    __shared__ u32 greatest_of[kThreads / 32];

    // Magnitudes order like their bits as integers, with NaN above infinity.
    u32 greatest = 0;
#pragma unroll 4
    for (int octet = threadIdx.x; octet < chunks * kOctets; octet += kThreads) {
        float x[8];
        load_octet(x, p, token, x_row, octet);
#pragma unroll
        for (int k = 0; k < 8; ++k) greatest = max(greatest, __float_as_uint(x[k]) & 0x7fffffffu);
    }
    greatest = __reduce_max_sync(~0u, greatest);
    if (threadIdx.x % 32 == 0) greatest_of[threadIdx.x / 32] = greatest;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < kThreads / 32; ++w) greatest = max(greatest, greatest_of[w]);

    // The smallest power of two that brings the magnitude to at most 448 = 1.75 * 2^8: fractions above 1.75 need the
    // next power of two.
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
        load_octet(x, p, token, x_row, octet);
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
                // Clamp. Comparisons with NaN are false, so NaN stays.
                if (8 * octet + k < p.in_features)
                    to[k] = from_float<kType>(value > largest ? largest : value < -largest ? -largest : value);
            }
        }
    }
}
