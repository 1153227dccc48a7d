// Computes the result y from the products t = x W^T and f_i = x (F_i * W)^T and the mask weights r_i. It also computes
// the partial derivatives that the backward pass needs, P = dy/dt, Q_i = dy/df_i and R_i = dy/dr_i (training.md):
//
//   g_i = (t - f_i) / 2,   v_i = (t + f_i) / 2,   y = sum_i r_i act(g_i) v_i
//   P = sum_i r_i (act'(g_i) v_i + act(g_i)) / 2,   Q_i = r_i (act(g_i) - act'(g_i) v_i) / 2,   R_i = act(g_i) v_i
//
// A token has several entries, each a row of `columns` elements. The products are t, then f_1, f_2, ... The partials
// are P, then the Q_i, then with mask weights the R_i. Partials may overwrite products of the same dtype: only one
// thread uses an element, and the thread reads the element before writing it. Arithmetic is in float32, and every
// element is read and written once.
//
// torch's grouped_mm rounds products to 16 bits, and an error of t would enter every gate and value. So for experts t
// may be a separate float32 tensor (MGLU_TOTAL), or the products are g_1, v_1, g_2, v_2, ... (MGLU_PARTS).
#include "activation.cuh"
#include "columns.cuh"

namespace mglu {

struct Params {
    const void* total;         // t [tokens, columns], contiguous, with MGLU_TOTAL; else null
    const void* products;      // [tokens, entries, columns] with contiguous columns
    void* partials;            // [tokens, kMasks + 1 or 2 kMasks + 1, columns] with contiguous columns
    const void* mask_weights;  // [tokens, kMasks], or null
    void* result;              // [tokens, columns] with contiguous columns
    i64 products_row_stride;
    i64 products_entry_stride;
    i64 partials_row_stride;
    i64 partials_entry_stride;
    i64 result_row_stride;
    i64 mask_weight_row_stride;
    i64 mask_weight_column_stride;
    i64 tokens;
    int columns;
};

constexpr int kType = MGLU_ELEMENT;
constexpr int kProductsType = MGLU_PRODUCTS;
constexpr int kTotalType = MGLU_TOTAL;  // -1 if t is the first product, or not needed (kParts)
constexpr bool kParts = MGLU_PARTS;
constexpr int kMasks = MGLU_N_MASKS;
static_assert(!kParts || kTotalType < 0, "gates and values need no t");
constexpr Activation kActivation = static_cast<Activation>(MGLU_ACTIVATION);
constexpr int kMaskWeightType = MGLU_MASK_WEIGHTS;  // -1: no mask weights
constexpr bool kWeighted = kMaskWeightType >= 0;
constexpr int kColumns = 4;  // columns of a thread; with 8, there are too few registers to load the next mask ahead
constexpr int kBlocksPerSm = kWeighted || !kVector ? 4 : 5;  // as many as fit without register spills

__device__ __forceinline__ float load_mask_weight(const Params& p, i64 token, int mask) {
    if constexpr (kWeighted) {
        const auto* mask_weight = static_cast<const typename Element<kMaskWeightType>::Bits*>(p.mask_weights);
        return to_float<kMaskWeightType>(
            mask_weight[token * p.mask_weight_row_stride + mask * p.mask_weight_column_stride]);
    } else {
        return 1.0f;
    }
}

// The sums of a thread's columns, and the offsets of its next products and partials.
struct Sums {
    i64 product, partial;
    float half_total[kColumns];     // t / 2; unused with MGLU_PARTS
    float result[kColumns] = {};    // y
    float by_total[kColumns] = {};  // 2 P
};

// Adds kCount masks from `mask` on. All their products are loaded before the first is used.
template <int kCount>
__device__ __forceinline__ void add_masks(Sums& sums, const Params& p, const Position<kColumns>& at, int mask) {
    // `flipped` holds f_i. With MGLU_PARTS, `gates` holds g_i and `flipped` holds v_i.
    Group<kProductsType, kColumns> gates[kCount], flipped[kCount];
    float mask_weight[kCount];
#pragma unroll
    for (int j = 0; j < kCount; ++j, sums.product += p.products_entry_stride) {
        if constexpr (kParts) {
            gates[j] = load_group<kProductsType, kColumns>(p.products, sums.product, at.count);
            sums.product += p.products_entry_stride;
        }
        flipped[j] = load_group<kProductsType, kColumns>(p.products, sums.product, at.count);
        mask_weight[j] = load_mask_weight(p, at.row, mask + j);
    }
#pragma unroll
    for (int j = 0; j < kCount; ++j, sums.partial += p.partials_entry_stride) {
        float by_flipped[kColumns], by_mask_weight[kColumns];
#pragma unroll
        for (int k = 0; k < kColumns; ++k) {
            const float gate = kParts ? gates[j][k] : fmaf(-0.5f, flipped[j][k], sums.half_total[k]);
            const float value = kParts ? flipped[j][k] : fmaf(0.5f, flipped[j][k], sums.half_total[k]);
            const ValueAndDerivative act = activate_with_derivative<kActivation, true>(gate);
            float activated = act.value, slope = act.derivative;
            by_mask_weight[k] = activated * value;
            if constexpr (kWeighted) activated *= mask_weight[j], slope *= mask_weight[j];
            sums.result[k] = fmaf(activated, value, sums.result[k]);
            sums.by_total[k] += fmaf(slope, value, activated);
            by_flipped[k] = 0.5f * fmaf(-slope, value, activated);
        }
        store_group(p.partials, sums.partial, rounded<kType>(by_flipped), at.count);
        if constexpr (kWeighted)
            store_group(p.partials, sums.partial + kMasks * p.partials_entry_stride, rounded<kType>(by_mask_weight),
                        at.count);
    }
}

}  // namespace mglu

extern "C" __global__ void __launch_bounds__(mglu::kThreads, mglu::kBlocksPerSm)
    mglu_partials(const __grid_constant__ mglu::Params p) {
    using namespace mglu;
    const Position<kColumns> at(p.tokens, p.columns);
    if (at.count == 0) return;
    const i64 product = at.row * p.products_row_stride + at.column;
    const i64 partial = at.row * p.partials_row_stride + at.column;
    Sums sums{product, partial + p.partials_entry_stride, {}};
    if constexpr (kTotalType >= 0) {
        const auto total = load_group<kTotalType, kColumns>(p.total, at.row * p.columns + at.column, at.count);
#pragma unroll
        for (int k = 0; k < kColumns; ++k) sums.half_total[k] = 0.5f * total[k];
    } else if constexpr (!kParts) {
        const auto total = load_group<kProductsType, kColumns>(p.products, product, at.count);
        sums.product += p.products_entry_stride;
#pragma unroll
        for (int k = 0; k < kColumns; ++k) sums.half_total[k] = 0.5f * total[k];
    }

    int mask = 0;
#pragma unroll 1
    for (; mask + kMasksAtOnce <= kMasks; mask += kMasksAtOnce) add_masks<kMasksAtOnce>(sums, p, at, mask);
    if constexpr (kMasks % kMasksAtOnce > 0) add_masks<kMasks % kMasksAtOnce>(sums, p, at, mask);

#pragma unroll
    for (int k = 0; k < kColumns; ++k) sums.by_total[k] *= 0.5f;
    store_group(p.partials, partial, rounded<kType>(sums.by_total), at.count);
    store_group(p.result, at.row * p.result_row_stride + at.column, rounded<kType>(sums.result), at.count);
}
