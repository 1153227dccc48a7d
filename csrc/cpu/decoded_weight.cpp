// Weights whose format is not dense are decoded in memory, one block of rows at a time, and then multiplied as dense
// weights. With few tokens, 8-bit weights with one scale per row are decoded by few_tokens.h instead, in registers.
//
// If each row has one scale, the stored numbers are converted to x's type, which is exact, and the row's sums are
// multiplied by the scale. If blocks or groups have scales, each stored number is multiplied by its scale instead. The
// decoded weight is then in float32, so x is converted to float32, and the layer's result back to x's type.
#include <algorithm>

#include "kernels.h"

namespace mglu::cpu {
namespace {

#include "element.h"

constexpr std::int64_t kBlockBytes = 1 << 21;  // bytes of decoded weights in a block, which stay in the caches
constexpr std::int64_t kGrain = 1 << 14;       // minimum number of elements of a task

// Maps each byte of fp8 or int8 to its number, as an element of type E.
template <class E>
struct Table {
    E value[256];

    explicit Table(WeightFormat format) {
        for (int bits = 0; bits < 256; ++bits) {
            const auto byte = static_cast<std::uint8_t>(bits);
            const bool is_int8 = format == WeightFormat::int8_row;
            const float number = is_int8 ? static_cast<std::int8_t>(byte) : to_float(Fp8{byte}) * kFactor<Fp8>;
            value[bits] = from_float<E>(number);
        }
    }
};

// Returns the scale of one weight. All weights of a block (128 x 128) or group (128 columns of a row) share a scale.
float scale_of(const Forward& call, std::int64_t row, std::int64_t column) {
    const std::int64_t groups = ceil_div(call.in_features, kScaledTogether), group = column / kScaledTogether;
    if (call.weight_format == WeightFormat::int4_group)
        return to_float(static_cast<const BFloat16*>(call.weight_scale)[row * groups + group]);
    return static_cast<const float*>(call.weight_scale)[row / kScaledTogether * groups + group];
}

template <class E>
void decode_row(const Forward& call, const Table<E>& table, std::int64_t row, E* to) {
    const std::int64_t width = call.in_features;
    const auto* from = static_cast<const std::uint8_t*>(call.weight) + row * call.weight_stride;
    if (call.weight_format == WeightFormat::int4_group) {
        for (std::int64_t k = 0; k < width; ++k)
            to[k] = from_float<E>(static_cast<float>((from[k / 2] >> k % 2 * 4 & 15) - 8));
    } else {
        for (std::int64_t k = 0; k < width; ++k) to[k] = table.value[from[k]];
    }
    if (has_row_scales(call.weight_format)) return;
    for (std::int64_t first = 0; first < width; first += kScaledTogether) {
        const float scale = scale_of(call, row, first);
        for (std::int64_t k = first; k < smaller(first + kScaledTogether, width); ++k)
            to[k] = from_float<E>(to_float(to[k]) * scale);
    }
}

// Runs a call whose x and result are of type E.
template <class E>
Status forward_blocks(const Forward& call, ParallelFor parallel_for, ForwardFunction run) {
    const std::int64_t row_bytes = std::max<std::int64_t>(call.in_features * static_cast<std::int64_t>(sizeof(E)), 1);
    const std::int64_t rows = smaller(std::max<std::int64_t>(kBlockBytes / row_bytes / 64, 1) * 64, call.out_features);
    const Floats memory = allocate_floats(ceil_div(rows * row_bytes, 4));
    if (!memory) return Status::out_of_memory;
    const Table<E> table(call.weight_format);
    E* const decoded = reinterpret_cast<E*>(memory.get());
    for (std::int64_t first = 0; first < call.out_features; first += rows) {
        const std::int64_t count = smaller(rows, call.out_features - first);
        const auto decode = [&](std::int64_t begin, std::int64_t end) {
            for (std::int64_t row = begin; row < end; ++row)
                decode_row(call, table, first + row, decoded + row * call.in_features);
        };
        Status status = over_ranges(parallel_for, count, ceil_div(kGrain, call.in_features + 1), decode);
        if (status != Status::ok) return status;
        Forward block = call;
        block.weight = decoded;
        block.weight_stride = call.in_features;
        block.weight_format = WeightFormat::dense;
        block.packed_masks = call.packed_masks + first * call.mask_stride;
        block.weight_scale =
            has_row_scales(call.weight_format) ? static_cast<const float*>(call.weight_scale) + first : nullptr;
        if (call.n_masks == 0) block.out = static_cast<float*>(call.out) + first;
        else block.out = static_cast<E*>(call.out) + first;
        block.out_features = count;
        status = run(block, parallel_for);
        if (status != Status::ok) return status;
    }
    return Status::ok;
}

// Converts a matrix to another type.
template <class From, class To>
Status convert(ParallelFor parallel_for, std::int64_t rows, std::int64_t columns, const From* from,
               std::int64_t from_stride, To* to, std::int64_t to_stride) {
    return over_ranges(parallel_for, rows, ceil_div(kGrain, columns + 1), [=](std::int64_t begin, std::int64_t end) {
        for (std::int64_t row = begin; row < end; ++row)
            for (std::int64_t k = 0; k < columns; ++k)
                to[row * to_stride + k] = from_float<To>(to_float(from[row * from_stride + k]));
    });
}

// Runs a call whose x and result are of a 16-bit type E, with x, W and products in float32.
template <class E>
Status forward_widened(const Forward& call, ParallelFor parallel_for, ForwardFunction run) {
    const Floats x = allocate_floats(call.tokens * call.in_features);
    const bool is_wide = call.n_masks == 0;  // the result is float32
    const Floats out = allocate_floats(is_wide ? 0 : call.tokens * call.out_features);
    if (!x || !out) return Status::out_of_memory;
    Status status = convert(parallel_for, call.tokens, call.in_features, static_cast<const E*>(call.x), call.x_stride,
                            x.get(), call.in_features);
    if (status != Status::ok) return status;
    Forward wide = call;
    wide.x = x.get();
    wide.x_stride = call.in_features;
    if (!is_wide) wide.out = out.get(), wide.out_stride = call.out_features;
    wide.dtype = DType::float32;
    status = forward_blocks<float>(wide, parallel_for, run);
    if (status != Status::ok || is_wide) return status;
    return convert(parallel_for, call.tokens, call.out_features, out.get(), call.out_features,
                   static_cast<E*>(call.out), call.out_stride);
}

}  // namespace

Status forward_decoded(const Forward& call, ParallelFor parallel_for, ForwardFunction run) {
    const bool narrow = has_row_scales(call.weight_format);
    switch (call.dtype) {
        case DType::float32: return forward_blocks<float>(call, parallel_for, run);
        case DType::bfloat16:
            return narrow ? forward_blocks<BFloat16>(call, parallel_for, run)
                          : forward_widened<BFloat16>(call, parallel_for, run);
        case DType::float16:
            return narrow ? forward_blocks<Float16>(call, parallel_for, run)
                          : forward_widened<Float16>(call, parallel_for, run);
    }
    return Status::invalid_argument;
}

}  // namespace mglu::cpu
