// Computes the gradients of the weight and of the mask logits from the products D_0 = grad_t^T x and D_i = grad_f_i^T x
// (training.md):
//
//   grad_weight = D_0 + sum_i F_i * D_i,   grad_logits_i = -2 W * D_i
//
// If only one of the two gradients is needed, inputs that serve only the other are not read. The gradients may have
// different dtypes. A gradient may overwrite D_0 or D_i of the same dtype: only one thread uses an element, and the
// thread reads the element before writing it. Arithmetic is in float32, and each element is read and written once.
//
// W holds the rows of all experts, one expert after the other. Each expert has its own stacks of D_i and of
// grad_logits_i. A layer without experts counts as one expert.
#include "columns.cuh"

namespace mglu {

struct Params {
    const void* total;       // D_0 [rows, columns], contiguous; read for grad_weight
    const void* weight;      // [rows, columns] with contiguous columns; read for grad_logits
    const u8* packed_masks;  // the packed format (packed_masks.cuh), contiguous; read for grad_weight
    const void* products;    // D_i [rows / expert_rows, kMasks, expert_rows, columns]; each matrix is contiguous
    void* grad_weight;
    void* grad_logits;
    i64 weight_row_stride;
    i64 products_stride;  // from one mask to the next
    i64 logits_stride;
    i64 rows;
    i64 expert_rows;  // rows of one expert
    i64 columns;
};

constexpr int kType = MGLU_ELEMENT;
constexpr int kTotalType = MGLU_TOTAL;
constexpr int kMasks = MGLU_N_MASKS;
constexpr int kWeightType = MGLU_GRAD_WEIGHT;  // the gradients' dtypes; -1 if a gradient is not needed
constexpr int kLogitsType = MGLU_GRAD_LOGITS;
constexpr bool kWeight = kWeightType >= 0;
constexpr bool kLogits = kLogitsType >= 0;

// The offsets of a mask's 8 columns in each tensor. From mask to mask, each offset advances by the stride of its
// tensor.
struct MaskOffsets {
    const u8* masks;
    i64 product, logits;
    int count;
};

// Writes grad_logits of the next kCount masks, and adds their F_i * D_i to grad_weight. All D_i are loaded before the
// first is used.
template <int kCount>
__device__ __forceinline__ void add_masks(float (&sum)[kOctet], const Group<kType, kOctet>& weight, const Params& p,
                                          MaskOffsets& at) {
    OctetMasks<kCount> masks;
    if constexpr (kWeight) masks = OctetMasks<kCount>::load(at.masks);
    at.masks += kCount;
    Group<kType, kOctet> product[kCount];
#pragma unroll
    for (int j = 0; j < kCount; ++j, at.product += p.products_stride)
        product[j] = load_group<kType, kOctet>(p.products, at.product, at.count);
#pragma unroll
    for (int j = 0; j < kCount; ++j, at.logits += p.logits_stride) {
        if constexpr (kWeight) {
            const auto flipped = masks.flip(j, product[j]);
#pragma unroll
            for (int k = 0; k < kOctet; ++k) sum[k] += flipped[k];
        }
        if constexpr (kLogits) {
            float by_logit[kOctet];
#pragma unroll
            for (int k = 0; k < kOctet; ++k) by_logit[k] = -2.0f * weight[k] * product[j][k];
            store_group(p.grad_logits, at.logits, rounded<kLogitsType>(by_logit), at.count);
        }
    }
}

}  // namespace mglu

extern "C" __global__ void __launch_bounds__(mglu::kThreads)
    mglu_weight_gradients(const __grid_constant__ mglu::Params p) {
    using namespace mglu;
    const Position<kOctet> index(p.rows, static_cast<int>(p.columns));
    if (index.count == 0) return;
    const i64 element = index.row * p.columns + index.column;
    const i64 octet = index.row * packed_octets(p.columns) + index.column / kOctet;
    Group<kType, kOctet> weight;
    float sum[kOctet];
    if constexpr (kWeight) {
        const auto total = load_group<kTotalType, kOctet>(p.total, element, index.count);
#pragma unroll
        for (int k = 0; k < kOctet; ++k) sum[k] = total[k];
    }
    if constexpr (kLogits)
        weight = load_group<kType, kOctet>(p.weight, index.row * p.weight_row_stride + index.column, index.count);

    const i64 expert = static_cast<u32>(index.row) / static_cast<u32>(p.expert_rows);
    const i64 before = expert * (kMasks - 1) * p.expert_rows * p.columns + element;  // in the first mask's matrix
    MaskOffsets at{p.packed_masks + octet * kMasks, before, before, index.count};
#pragma unroll 1
    for (int mask = 0; mask + kMasksAtOnce <= kMasks; mask += kMasksAtOnce) add_masks<kMasksAtOnce>(sum, weight, p, at);
    if constexpr (kMasks % kMasksAtOnce > 0) add_masks<kMasks % kMasksAtOnce>(sum, weight, p, at);
    if constexpr (kWeight) store_group(p.grad_weight, element, rounded<kWeightType>(sum), index.count);
}
