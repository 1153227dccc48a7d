// A copy of x for tile_wgmma.cu: one piece of memory a stage, in the order of wgmma's B operand that suits masks best.
//
// The result is [tile of kTokens tokens][64 columns of k][token][64], zeros past the last token and the end of k. Of each
// token's 64 columns, seen as 8 octets of 8, the fragments of W (mask_fragment.cuh) want element j of octet o at 8 j + o:
// an 8x8 transposition; and wgmma wants the 16-byte vector v of token n at v ^ (n % 8), which keeps its reads off each
// other's banks. A warp turns 8 tokens of one chunk of 64 columns.
#include "params.cuh"
#include "ptx.cuh"

namespace mglu {

constexpr int kTokens = MGLU_TOKEN_COLUMNS;
constexpr int kSub = MGLU_SUB;  // chunks of k a stage; the last stage is filled up with zeros

}  // namespace mglu

extern "C" __global__ void __launch_bounds__(256) mglu_permute_x(const __grid_constant__ mglu::Params p) {
    using namespace mglu;
    // All kernels before this one are complete when any block of the next one starts, so that it waits for x only.
    wait_for_earlier_kernels();
    let_next_kernel_start();
    const int lane = threadIdx.x % 32;
    const int chunks = (p.in_features + 64 * kSub - 1) / (64 * kSub) * kSub;
    const int groups = (p.tokens + kTokens - 1) / kTokens * (kTokens / 8);
    const int item = (blockIdx.x * 256 + threadIdx.x) / 32;
    if (item >= groups * chunks) return;
    const int chunk = item % chunks;
    const int first = item / chunks * 8;
    const int k = chunk * 64 + 2 * lane;
    const u16* x = static_cast<const u16*>(p.x);
    u32 pair[8];
#pragma unroll
    for (int n = 0; n < 8; ++n) {
        pair[n] = 0;
        if (first + n >= p.tokens || k >= p.in_features) continue;
        const u16* from = x + (first + n) * p.x_row_stride + k * p.x_column_stride;
        pair[n] = p.x_is_vectorizable ? *reinterpret_cast<const u32*>(from)
                                      : from[0] | static_cast<u32>(from[p.x_column_stride]) << 16;
    }
    const i64 tile = static_cast<i64>(first / kTokens) * chunks + chunk;
    u8* to = static_cast<u8*>(p.out) + (tile * kTokens + first % kTokens) * 128;
#pragma unroll
    for (int n = 0; n < 8; ++n)
        *reinterpret_cast<u32*>(to + n * 128 + (lane / 4 ^ n) * 16 + lane % 4 * 4) = transpose(pair[n]);
}
