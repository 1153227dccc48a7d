// Decodes a weight to the 16-bit type of x, once for all tokens of a call. tile_wgmma decodes W again for every tile of
// tokens, which takes longer if there are many tiles (tile_wgmma.md).
//
// Each thread decodes one vector of 16 bytes. p.out is contiguous, [out_features][in_features], and the scales are
// multiplied in. The requirements of tile_wgmma apply.
#include "weight_format.cuh"

namespace mglu {

constexpr int kType = MGLU_ELEMENT;
constexpr WeightFormat kFormat = static_cast<WeightFormat>(MGLU_WEIGHT_FORMAT);
using Weight = WeightPairs<kFormat, kType>;
constexpr int kColumns = 128 / Weight::kBits;  // columns of a vector of 16 bytes

}  // namespace mglu

extern "C" __global__ void __launch_bounds__(256) mglu_decode_weight(const __grid_constant__ mglu::Params p) {
    using namespace mglu;
    wait_for_earlier_kernels();
    let_next_kernel_start();
    const u32 vectors = p.in_features / kColumns;  // vectors of a row
    const u32 item = blockIdx.x * 256 + threadIdx.x;
    const i64 row = item / vectors;
    const int column = item % vectors * kColumns;
    if (row >= p.out_features) return;
    u32 words[4];
    load_global(words, static_cast<const u8*>(p.weight) + row * p.weight_row_stride + column * Weight::kBits / 8);
    const float scale = StoredWeight<kFormat, kType>::scale(p, row, column);
    u16* to = static_cast<u16*>(p.out) + row * p.in_features + column;
#pragma unroll
    for (int octet = 0; octet < kColumns / 8; ++octet) {
        u32 pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int bit = (octet * 8 + 2 * i) * Weight::kBits;
            const u32 bits = words[bit / 32] >> bit % 32 & ((1u << 2 * Weight::kBits) - 1);
            pairs[i] = convert_pair<kType, kType>(Weight::neighbours(bits), scale);
        }
        store_global(to + octet * 8, pairs);
    }
}
