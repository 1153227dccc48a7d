// Weights in other formats than x's type: rows are decoded to x's type, a block at a time, and multiplied as dense ones.
// Every decoded value is exact, since the row's scale multiplies the sums.
#include <algorithm>

#include "kernels.h"

namespace mglu::cpu {
namespace {

#include "element.h"

constexpr std::int64_t kBlockBytes = 1 << 21;  // decoded weights of a block, which stay in the caches
constexpr std::int64_t kGrain = 1 << 14;       // weights of a task, at least

float decode_e4m3(std::uint8_t bits) {
    const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x80) << 24, magnitude = bits & 0x7f;
    if (magnitude == 0x7f) return bit_cast<float>(0x7fc00000u);
    return bit_cast<float>(sign | bit_cast<std::uint32_t>(bit_cast<float>(magnitude << 20) * 0x1p120f));
}

// Each value of a byte as an element of x's type.
template <class E>
struct Table {
    E value[256];

    Table() {
        for (int bits = 0; bits < 256; ++bits)
            value[bits] = from_float<E>(decode_e4m3(static_cast<std::uint8_t>(bits)));
    }
};

template <class E>
struct Decode {
    const Forward& call;
    std::int64_t first_row;
    E* to;
    Table<E> table;

    static void run(std::int64_t begin, std::int64_t end, void* context) {
        const auto& job = *static_cast<const Decode*>(context);
        for (std::int64_t row = begin; row < end; ++row) {
            const auto* from =
                static_cast<const std::uint8_t*>(job.call.weight) + (job.first_row + row) * job.call.weight_stride;
            E* to = job.to + row * job.call.in_features;
            for (std::int64_t k = 0; k < job.call.in_features; ++k) to[k] = job.table.value[from[k]];
        }
    }
};

template <class E>
Status forward_typed(const Forward& call, ParallelFor parallel_for, ForwardFunction run) {
    const std::int64_t row_bytes = std::max<std::int64_t>(call.in_features * static_cast<std::int64_t>(sizeof(E)), 1);
    const std::int64_t rows = smaller(std::max<std::int64_t>(kBlockBytes / row_bytes / 64, 1) * 64, call.out_features);
    const Floats memory = allocate_floats(ceil_div(rows * row_bytes, 4));
    if (!memory) return Status::out_of_memory;
    Decode<E> job{call, 0, reinterpret_cast<E*>(memory.get()), {}};
    for (; job.first_row < call.out_features; job.first_row += rows) {
        const std::int64_t count = smaller(rows, call.out_features - job.first_row);
        if (parallel_for(0, count, ceil_div(kGrain, call.in_features + 1), Decode<E>::run, &job))
            return Status::parallel_for_failed;
        Forward block = call;
        block.weight = job.to;
        block.weight_stride = call.in_features;
        block.weight_format = WeightFormat::dense;
        block.packed_masks = call.packed_masks + job.first_row * call.mask_stride;
        block.weight_scale = call.weight_scale + job.first_row;
        block.out = static_cast<E*>(call.out) + job.first_row;
        block.out_features = count;
        const Status status = run(block, parallel_for);
        if (status != Status::ok) return status;
    }
    return Status::ok;
}

}  // namespace

Status forward_decoded(const Forward& call, ParallelFor parallel_for, ForwardFunction run) {
    switch (call.dtype) {
        case DType::float32: return forward_typed<float>(call, parallel_for, run);
        case DType::bfloat16: return forward_typed<BFloat16>(call, parallel_for, run);
        case DType::float16: return forward_typed<Float16>(call, parallel_for, run);
    }
    return Status::invalid_argument;
}

}  // namespace mglu::cpu
