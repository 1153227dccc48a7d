// Copies x for tile_wgmma.cu with permuted columns, so that the x of a stage is one contiguous block (tile_wgmma.md).
//
// The copy is [tile of kTokens tokens][chunk of 64 columns][token][64], with zeros past the last token and the end of
// k. Two permutations apply to the 64 columns of a token and chunk. First, they are transposed as an 8x8 matrix: column
// 8 o + j goes to 8 j + o. In this order a lane of the mainloop needs only two bytes of each mask (mask_fragment.cuh).
// Second, the 16-byte vector v of token n goes to v ^ (n % 8), the 128-byte swizzle that wgmma expects of its B
// operand. A warp permutes 8 tokens of one chunk.
//
// For experts (MGLU_ITEMS), the copy is [row][whole chunks]: the rows of x sorted by expert, from which TMA loads the
// rows of an item. With MGLU_PERMUTED = 0 the columns keep their order.
#include "params.cuh"
#include "ptx.cuh"
#include "work.cuh"

namespace mglu {

constexpr int kTokens = MGLU_TOKEN_COLUMNS;
constexpr int kStageChunks = MGLU_SUB;  // chunks of 64 columns in a stage; the last stage is padded with zeros
constexpr bool kGather = kItems == Items::table;
#ifdef MGLU_PERMUTED
constexpr bool kPermute = MGLU_PERMUTED != 0;
#else
constexpr bool kPermute = true;
#endif

}  // namespace mglu

extern "C" __global__ void __launch_bounds__(256)
    mglu_permute_x(const __grid_constant__ mglu::Params p MGLU_ITEM_PARAMS) {
    using namespace mglu;
    // tile_wgmma may start and load W while this kernel runs. tile_wgmma only has to wait for this kernel, which has
    // waited for all earlier kernels.
    wait_for_earlier_kernels();
    let_next_kernel_start();
    const int lane = threadIdx.x % 32;
    const int chunks = (p.in_features + 64 * kStageChunks - 1) / (64 * kStageChunks) * kStageChunks;
    const int groups = (p.tokens + kTokens - 1) / kTokens * (kTokens / 8);
    const int item = (blockIdx.x * 256 + threadIdx.x) / 32;
    if (item >= groups * chunks) return;
    const int chunk = item % chunks;
    const int first = item / chunks * 8;
    const int k = chunk * 64 + 2 * lane;
    const u16* x = static_cast<const u16*>(p.x);
    const auto x_row = [&](int token) {
#if MGLU_ITEMS
        return x_row_at(items, token);
#else
        return token;
#endif
    };
    u32 pair[8];
#pragma unroll
    for (int n = 0; n < 8; ++n) {
        pair[n] = 0;
        if (first + n >= p.tokens || k >= p.in_features) continue;
        const u16* from = x + x_row(first + n) * p.x_row_stride + k * p.x_column_stride;
        pair[n] = p.x_is_vectorizable ? *reinterpret_cast<const u32*>(from)
                                      : from[0] | static_cast<u32>(from[p.x_column_stride]) << 16;
    }
    if constexpr (kGather) {
        u8* to = static_cast<u8*>(p.out) + (static_cast<i64>(first) * chunks + chunk) * 128 + lane * 4;
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            const u32 value = kPermute ? transpose(pair[n]) : pair[n];
            if (first + n < p.tokens) *reinterpret_cast<u32*>(to + static_cast<i64>(n) * chunks * 128) = value;
        }
        return;
    }
    const i64 tile = static_cast<i64>(first / kTokens) * chunks + chunk;
    u8* to = static_cast<u8*>(p.out) + (tile * kTokens + first % kTokens) * 128;
#pragma unroll
    for (int n = 0; n < 8; ++n)
        *reinterpret_cast<u32*>(to + n * 128 + (lane / 4 ^ n) * 16 + lane % 4 * 4) = transpose(pair[n]);
}
