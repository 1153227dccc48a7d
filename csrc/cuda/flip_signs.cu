// Writes F_i * W for every mask as one stack, an operand of the training step's GEMMs (training.md). With
// MGLU_WITH_WEIGHT the stack begins with W. F_i is -1 where M_i = 1 and 1 elsewhere, so multiplying by it flips sign
// bits of float16 or bfloat16. With MGLU_PARTS the kernel writes M_i * W and (1 - M_i) * W for every mask instead.
//
// W holds the rows of all experts, one expert after the other, and each expert has its own stack. A layer without
// experts counts as one expert.
//
// The kernel is bound by its writes; W and the mask bits are read once.
#include "columns.cuh"

namespace mglu {

struct Params {
    const void* weight;      // [rows, columns] with contiguous columns
    const u8* packed_masks;  // the packed format (packed_masks.cuh), contiguous
    void* out;               // [rows / expert_rows, kMatrices, expert_rows, columns], contiguous
    i64 weight_row_stride;
    i64 rows;
    i64 expert_rows;  // rows of one expert
    int columns;
};

constexpr int kMasks = MGLU_N_MASKS;
constexpr bool kWithWeight = MGLU_WITH_WEIGHT;
constexpr bool kParts = MGLU_PARTS;
constexpr int kMatrices = kParts ? 2 * kMasks : kMasks + kWithWeight;
static_assert(!kParts || !kWithWeight, "the parts have no W beside them");
constexpr int kType = kFloat16;  // serves bfloat16 too, whose sign bit is the same

}  // namespace mglu

extern "C" __global__ void __launch_bounds__(mglu::kThreads) mglu_flip_signs(const __grid_constant__ mglu::Params p) {
    using namespace mglu;
    const Position<kOctet> at(p.rows, p.columns);
    if (at.count == 0) return;
    const i64 octet = at.row * packed_octets(p.columns) + at.column / kOctet;
    const auto masks = OctetMasks<kMasks>::load(p.packed_masks + octet * kMasks);
    const auto weight = load_group<kType, kOctet>(p.weight, at.row * p.weight_row_stride + at.column, at.count);
    const i64 matrix = p.expert_rows * p.columns;
    const u32 expert = static_cast<u32>(at.row) / static_cast<u32>(p.expert_rows);
    i64 offset = expert * (kMatrices - 1) * matrix + at.row * p.columns + at.column;
    if constexpr (kWithWeight) {
        store_group(p.out, offset, weight, at.count);
        offset += matrix;
    }
#pragma unroll
    for (int i = 0; i < kMasks; ++i) {
        if constexpr (kParts) {
            const auto part = masks.keep(i, weight);
            store_group(p.out, offset + 2 * i * matrix, part, at.count);
            store_group(p.out, offset + (2 * i + 1) * matrix, without(weight, part), at.count);
        } else {
            store_group(p.out, offset + i * matrix, masks.flip(i, weight), at.count);
        }
    }
}
