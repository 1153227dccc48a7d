// Multiplies the gradient G of the result by the partial derivatives that the forward pass kept: grad_t = G * P and
// grad_f_i = G * Q_i, the operands of the backward GEMMs (training.md). A token has kEntries entries, each a row of
// `columns` elements.
//
// The kernel is memory-bound: each partial is read once, and each product is written once.
#include "columns.cuh"

namespace mglu {

struct Params {
    const void* grad_output;  // [tokens, columns] with contiguous columns
    const void* partials;     // [tokens, kEntries, columns] with contiguous columns
    void* out;                // [tokens, kEntries, columns], contiguous
    i64 grad_output_row_stride;
    i64 partials_row_stride;
    i64 partials_entry_stride;
    i64 tokens;
    int columns;
};

constexpr int kType = MGLU_ELEMENT;
constexpr int kEntries = MGLU_ENTRIES;

}  // namespace mglu

extern "C" __global__ void __launch_bounds__(mglu::kThreads) mglu_scale(const __grid_constant__ mglu::Params p) {
    using namespace mglu;
    const Position<kOctet> at(p.tokens, p.columns);
    if (at.count == 0) return;
    const i64 from = at.row * p.partials_row_stride + at.column;
    const i64 to = at.row * kEntries * p.columns + at.column;
    const auto gradient =
        load_group<kType, kOctet>(p.grad_output, at.row * p.grad_output_row_stride + at.column, at.count);
#pragma unroll
    for (int first = 0; first < kEntries; first += kMasksAtOnce) {
        Group<kType, kOctet> partial[kMasksAtOnce];
#pragma unroll
        for (int j = 0; j < kMasksAtOnce; ++j)
            if (first + j < kEntries)
                partial[j] =
                    load_group<kType, kOctet>(p.partials, from + (first + j) * p.partials_entry_stride, at.count);
#pragma unroll
        for (int j = 0; j < kMasksAtOnce; ++j) {
            if (first + j >= kEntries) break;
            float product[kOctet];
#pragma unroll
            for (int k = 0; k < kOctet; ++k) product[k] = gradient[k] * partial[j][k];
            const i64 entry = static_cast<i64>(first + j) * p.columns;
            store_group(p.out, to + entry, rounded<kType>(product), at.count);
        }
    }
}
