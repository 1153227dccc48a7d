// Writes F_i * W for every mask, and with MGLU_WITH_WEIGHT W itself before them: the stacked weights of one library
// GEMM (training.md). F_i is -1 where M_i = 1 and 1 elsewhere, so that a product with it flips sign bits, in float16
// and bfloat16 alike.
//
// The kernel is bound by its writes; W and the mask bits are read once.
#include "columns.cuh"

namespace mglu {

struct Params {
    const void* weight;      // [rows, columns] with contiguous columns
    const u8* packed_masks;  // the packed format (packed_masks.cuh), contiguous
    void* out;               // [kMasks or kMasks + 1, rows, columns], contiguous
    i64 weight_row_stride;
    i64 rows;
    int columns;
};

constexpr int kMasks = MGLU_N_MASKS;
constexpr bool kWithWeight = MGLU_WITH_WEIGHT;
constexpr int kType = kFloat16;  // serves bfloat16 as well: the sign bit is in the same place

}  // namespace mglu

extern "C" __global__ void __launch_bounds__(mglu::kThreads) mglu_flip_signs(const __grid_constant__ mglu::Params p) {
    using namespace mglu;
    const Position<kOctet> at(p.rows, p.columns);
    if (at.count == 0) return;
    const i64 octet = at.row * packed_octets(p.columns) + at.column / kOctet;
    const auto masks = OctetMasks<kMasks>::load(p.packed_masks + octet * kMasks);
    const auto weight = load_group<kType, kOctet>(p.weight, at.row * p.weight_row_stride + at.column, at.count);
    const i64 matrix = p.rows * p.columns;
    i64 offset = at.row * p.columns + at.column;
    if constexpr (kWithWeight) {
        store_group(p.out, offset, weight, at.count);
        offset += matrix;
    }
#pragma unroll
    for (int i = 0; i < kMasks; ++i) store_group(p.out, offset + i * matrix, masks.flip(i, weight), at.count);
}
