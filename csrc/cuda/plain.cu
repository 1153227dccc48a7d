// The kernel for calls that no faster kernel takes: any dtype, strides, alignment and in_features (plain.md).
//
// A warp computes one row of W for up to kTokens tokens: t = x W^T and s_i = x (M_i * W)^T. The gate is s_i, and the
// value is t - s_i. Each lane reads eight columns at a time, as vectors if the rows are aligned.
#include "activation.cuh"
#include "element.cuh"
#include "packed_masks.cuh"
#include "params.cuh"
#include "ptx.cuh"
#include "weight_format.cuh"
#include "work.cuh"
#include "mask_weights.cuh"

namespace mglu {

constexpr int kType = MGLU_ELEMENT;
constexpr int kMasks = MGLU_N_MASKS;
constexpr Activation kActivation = static_cast<Activation>(MGLU_ACTIVATION);
constexpr int kTokens = MGLU_TOKENS;  // tokens that share one read of W
constexpr int kWarps = 8;
using Bits = typename Element<kType>::Bits;
using X = StoredWeight<WeightFormat::dense, kType>;
using Weight = StoredWeight<static_cast<WeightFormat>(MGLU_WEIGHT_FORMAT), kType>;

// The bytes of eight stored columns.
template <class Stored>
constexpr int kOctetBytes = sizeof(typename Stored::Bits) * kOctet / Stored::kColumns;
// The bytes of one load in load_octet().
template <class Stored>
constexpr int kLoad = kOctetBytes<Stored> < 16 ? kOctetBytes<Stored> : 16;

// Loads eight consecutive columns from column k on; columns past the end of the row are zero. With `vector`, rows are
// contiguous and aligned to the size of a load.
template <class Stored>
__device__ __forceinline__ void load_octet(float (&value)[8], const typename Stored::Bits* row, i64 stride, int k,
                                           int end, bool vector) {
    constexpr int kColumns = Stored::kColumns;
    union {
        typename Stored::Bits element[8 / kColumns];
        Vec16 vector16[2];
        u64 vector8;
        u32 vector4;
    } read;
    if (vector && k + 8 <= end) {
        const typename Stored::Bits* from = row + k / kColumns;
        if constexpr (kLoad<Stored> == 4) {
            read.vector4 = *reinterpret_cast<const u32*>(from);
        } else if constexpr (kLoad<Stored> == 8) {
            read.vector8 = *reinterpret_cast<const u64*>(from);
        } else {
#pragma unroll
            for (int v = 0; v < sizeof(read.element) / 16; ++v)
                read.vector16[v] = reinterpret_cast<const Vec16*>(from)[v];
        }
#pragma unroll
        for (int j = 0; j < 8; ++j) value[j] = Stored::decode(read.element[j / kColumns], j % kColumns);
    } else {
#pragma unroll
        for (int j = 0; j < 8; ++j)
            value[j] = k + j < end ? Stored::decode(row[(k + j) / kColumns * stride], j % kColumns) : 0.0f;
    }
}

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(0xffffffffu, value, distance);
    return value;
}

template <class Stored>
__device__ __forceinline__ bool is_aligned(const void* pointer, i64 row_stride, i64 column_stride) {
    return column_stride == 1 && reinterpret_cast<u64>(pointer) % kLoad<Stored> == 0 &&
           row_stride * static_cast<i64>(sizeof(typename Stored::Bits)) % kLoad<Stored> == 0;
}

}  // namespace mglu

extern "C" __global__ void __launch_bounds__(32 * mglu::kWarps)
    mglu_plain(const __grid_constant__ mglu::Params all MGLU_ITEM_PARAMS) {
    using namespace mglu;
    const int lane = threadIdx.x % 32;
#if MGLU_ITEMS
    __shared__ int rows_of_item[kTokens];
    const Item item = item_of_block<kTokens, 1>(items, (all.out_features + kWarps - 1) / kWarps, rows_of_item);
    if (item.count == 0) return;
    __syncthreads();
    const RowsOfItem rows{rows_of_item, items.top_k};
    const Work<i64> work = {static_cast<i64>(item.row_block) * kWarps, 0};
    if (item.expert < 0) return store_zeros<kWarps, Bits>(all, rows, item.count, work.row);
    const Params p = narrow_to_item(all, items, item);
#else
    const Params& p = all;
    const RowsInOrder rows;
    const Work<i64> work = work_in_grid<kWarps, kTokens>();
#endif
    const i64 row = work.row + threadIdx.x / 32;
    if (row >= p.out_features) return;
    const int first_token = work.token;
    const auto* weight = static_cast<const typename Weight::Bits*>(p.weight) + row * p.weight_row_stride;
    const Bits* x = static_cast<const Bits*>(p.x);
    const bool weight_vector = is_aligned<Weight>(p.weight, p.weight_row_stride, p.weight_column_stride);
    const bool x_vector = is_aligned<X>(p.x, p.x_row_stride, p.x_column_stride);

    float t[kTokens] = {};
    float s[kMasks][kTokens] = {};
    for (int k = lane * kOctet; k < p.in_features; k += 32 * kOctet) {
        float w[8];
        load_octet<Weight>(w, weight, p.weight_column_stride, k, p.in_features, weight_vector);
        const float scale = Weight::scale(p, row, k);
#pragma unroll
        for (int j = 0; j < 8; ++j) w[j] *= scale;
        // t and all s_i sum the same rounded products, so that rounding them causes no error in t - s_i.
        float product[kTokens][kOctet];
#pragma unroll
        for (int n = 0; n < kTokens; ++n) {
            float value[8];
            const int token = min(first_token + n, p.tokens - 1);
            load_octet<X>(value, x + rows.x_row(token) * p.x_row_stride, p.x_column_stride, k, p.in_features, x_vector);
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                product[n][j] = value[j] * w[j];
                t[n] += product[n][j];
            }
        }
        const u8* masks = p.packed_masks + row * p.mask_row_stride + k / kOctet * p.mask_octet_stride;
#pragma unroll
        for (int i = 0; i < kMasks; ++i) {
            const u32 bits = masks[i * p.mask_stride];
#pragma unroll
            for (int j = 0; j < 8; ++j)
#pragma unroll
                for (int n = 0; n < kTokens; ++n)
                    if (mask_bit(bits, j)) s[i][n] += product[n][j];
        }
    }

#pragma unroll
    for (int n = 0; n < kTokens; ++n) {
        const int token = first_token + n;
        const float sum_t = warp_sum(t[n]);
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kMasks; ++i) {
            const float gate = warp_sum(s[i][n]);
            if (token < p.tokens)
                sum += load_mask_weight<MGLU_MASK_WEIGHTS>(p, rows.result_row(token), i) *
                       (activate<kActivation, kType != kFloat32>(gate) * (sum_t - gate));
        }
        if (lane == 0 && token < p.tokens)
            static_cast<Bits*>(p.out)[static_cast<i64>(rows.result_row(token)) * p.out_features + row] =
                from_float<kType>(sum);
    }
}
