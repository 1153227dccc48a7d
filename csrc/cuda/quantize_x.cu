// Rounds x to float8_e4m3fn for tile_wgmma.cu (tile_fp8.cuh), each token with its own scale, and permutes its columns.
//
// The scale of a token is the smallest power of two that brings its largest magnitude to at most 448, the largest number
// of the type; it is 1 for zeros and NaN where x is not finite (mglu_ops/formats.py). The copy is [tile of kTokens
// tokens][chunk of 128 columns][token][128], with zeros past the last token and the end of k, then the scales of the
// tokens in float32. Two permutations apply to the 128 columns of a token and chunk. First, seen as a 16x8 matrix, they
// are transposed: column 8 o + j goes to 16 j + o. Second, the 16-byte vector v of token n goes to v ^ (n % 8), the
// 128-byte swizzle that wgmma expects of its B operand. A block takes one token, and a thread 8 columns at a time.
#include "element.cuh"
#include "params.cuh"
#include "ptx.cuh"

namespace mglu {

constexpr int kType = MGLU_ELEMENT;
constexpr int kTokens = MGLU_TOKEN_COLUMNS;
constexpr int kStageChunks = MGLU_SUB;  // chunks of 128 columns in a stage; the last stage is padded with zeros
constexpr int kThreads = 128;
constexpr int kOctets = 16;  // groups of 8 columns of a chunk

// Columns 8 octet to 8 octet + 7 of a token as pairs, zeros past the end.
__device__ __forceinline__ void load_octet(u32 (&pairs)[4], const Params& p, int token, int octet) {
    const u16* from = static_cast<const u16*>(p.x) + token * p.x_row_stride + 8 * octet * p.x_column_stride;
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = 0;
    if (token >= p.tokens || 8 * octet >= p.in_features) return;
    if (p.x_is_vectorizable) {
        load_global(pairs, from);
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            pairs[i] = from[2 * i * p.x_column_stride] | static_cast<u32>(from[(2 * i + 1) * p.x_column_stride]) << 16;
    }
}

// Four bytes: the pair of elements `low`, and `high`, each times `factor`.
__device__ __forceinline__ u32 round_to_fp8(u32 low, u32 high, float factor) {
    u32 result;
    asm("{\n\t.reg .b16 low, high;\n\tcvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n\t"
        "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n\tmov.b32 %0, {low, high};\n\t}"
        : "=r"(result)
        : "f"(to_float<kType>(low & 0xffffu) * factor), "f"(to_float<kType>(low >> 16) * factor),
          "f"(to_float<kType>(high & 0xffffu) * factor), "f"(to_float<kType>(high >> 16) * factor));
    return result;
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

extern "C" __global__ void __launch_bounds__(128) mglu_quantize_x(const __grid_constant__ mglu::Params p) {
    using namespace mglu;
    wait_for_earlier_kernels();
    let_next_kernel_start();
    const int token = blockIdx.x;
    const int chunks = (p.in_features + 128 * kStageChunks - 1) / (128 * kStageChunks) * kStageChunks;
    __shared__ u32 greatest_of[kThreads / 32];

    // Magnitudes compare like the integers of their bits.
    u32 greatest = 0;
#pragma unroll 4
    for (int octet = threadIdx.x; octet < chunks * kOctets; octet += kThreads) {
        u32 pairs[4];
        load_octet(pairs, p, token, octet);
#pragma unroll
        for (int i = 0; i < 4; ++i) greatest = max(greatest, max(pairs[i] & 0x7fffu, pairs[i] >> 16 & 0x7fffu));
    }
    greatest = __reduce_max_sync(~0u, greatest);
    if (threadIdx.x % 32 == 0) greatest_of[threadIdx.x / 32] = greatest;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < kThreads / 32; ++w) greatest = max(greatest, greatest_of[w]);

    // 448 is 1.75 times 2^8: a larger fraction needs the next power of two. The smallest scale is 2^-126.
    const u32 bits = __float_as_uint(to_float<kType>(greatest));
    const int exponent = static_cast<int>(bits >> 23) - 8 + ((bits & 0x7fffffu) > 0x600000u);
    const bool finite = bits < 0x7f800000u;
    const float scale = !finite ? __uint_as_float(0x7fc00000u) : bits == 0 ? 1.0f : __uint_as_float(max(exponent, 1) << 23);
    const float factor = __uint_as_float(0x7f000000u - __float_as_uint(scale));  // its inverse, if it is finite

    const i64 tile = token / kTokens;
    u8* out = static_cast<u8*>(p.out);
    const i64 tiles = gridDim.x / kTokens;
    if (threadIdx.x == 0) reinterpret_cast<float*>(out + tiles * chunks * (kTokens * 128))[token] = scale;
    const int r = threadIdx.x % 4;
#pragma unroll 4
    for (int first = 0; first < chunks * kOctets; first += kThreads) {
        const int octet = first + threadIdx.x;
        u32 pairs[4], word[2];
        load_octet(pairs, p, token, octet);
#pragma unroll
        for (int half = 0; half < 2; ++half)
            word[half] = transpose_among_4(round_to_fp8(pairs[2 * half], pairs[2 * half + 1], factor), r);
        if (octet >= chunks * kOctets) break;
        u8* to = out + ((tile * chunks + octet / kOctets) * kTokens + token % kTokens) * 128 + octet % kOctets / 4 * 4;
#pragma unroll
        for (int half = 0; half < 2; ++half)
            *reinterpret_cast<u32*>(to + ((4 * half + r) ^ token % 8) * 16) = word[half];
    }
}
