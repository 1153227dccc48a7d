// Layers of experts: the kernels of one layer run for each expert that has rows.
#include "experts.h"

#include "kernels.h"

namespace mglu::cpu {
namespace {

std::int64_t bytes_of(DType dtype) { return dtype == DType::float32 ? 4 : 2; }

const void* offset(const void* address, std::int64_t bytes) {
    return address == nullptr ? nullptr : static_cast<const char*>(address) + bytes;
}

// Memory for the rows of one expert, which grows if an expert has more rows than those before it.
class Rows {
  public:
    // Returns memory for `count` rows of `bytes` bytes, or null.
    char* of(std::int64_t count, std::int64_t bytes) {
        if (!memory_ || count * bytes > size_) {
            memory_.reset(new (std::nothrow) char[static_cast<std::size_t>(count * bytes)]);
            size_ = memory_ ? count * bytes : 0;
        }
        return memory_.get();
    }

  private:
    std::unique_ptr<char[]> memory_;
    std::int64_t size_ = 0;
};

struct Buffers {
    Rows x, out, weights;
};

// Runs an expert's layer for its rows. Consecutive rows are read and written where they are; others are copied.
Status run_layer(const Forward& first, const Experts& call, ParallelFor parallel_for, Buffers& buffers,
                 std::int64_t expert, const std::int64_t* rows, std::int64_t count) {
    const std::int64_t item = bytes_of(first.dtype);
    Forward layer = first;
    layer.tokens = count;
    layer.weight = offset(layer.weight, expert * call.weight_bytes);
    layer.packed_masks += expert * call.mask_bytes;
    layer.weight_scale = offset(layer.weight_scale, expert * call.scale_bytes);
    const std::int64_t weights_item = bytes_of(first.mask_weights_dtype);
    const std::int64_t row_bytes = first.out_features * item;
    if (count == 1 || call.is_sorted) {
        layer.x = offset(first.x, rows[0] / call.top_k * first.x_stride * item);
        layer.mask_weights = offset(first.mask_weights, rows[0] * first.mask_weight_stride * weights_item);
        layer.out = static_cast<char*>(first.out) + rows[0] * row_bytes;
        if (first.partials)
            layer.partials = static_cast<char*>(first.partials) + rows[0] * row_bytes * partials_of(first);
        return forward(layer, parallel_for);
    }
    const std::int64_t x_bytes = first.in_features * item;
    char* const x = buffers.x.of(count, x_bytes);
    char* const out = buffers.out.of(count, row_bytes);
    if (!x || !out) return Status::out_of_memory;
    for (std::int64_t i = 0; i < count; ++i)
        std::memcpy(x + i * x_bytes, offset(first.x, rows[i] / call.top_k * first.x_stride * item),
                    static_cast<std::size_t>(x_bytes));
    layer.x = x;
    layer.x_stride = first.in_features;
    layer.out = out;
    if (first.mask_weights) {
        char* const weights = buffers.weights.of(count, first.n_masks * weights_item);
        if (!weights) return Status::out_of_memory;
        for (std::int64_t i = 0; i < count; ++i)
            for (std::int64_t n = 0; n < first.n_masks; ++n)
                std::memcpy(
                    weights + (i * first.n_masks + n) * weights_item,
                    offset(first.mask_weights,
                           (rows[i] * first.mask_weight_stride + n * first.mask_weight_mask_stride) * weights_item),
                    static_cast<std::size_t>(weights_item));
        layer.mask_weights = weights;
        layer.mask_weight_stride = first.n_masks;
        layer.mask_weight_mask_stride = 1;
    }
    const Status status = forward(layer, parallel_for);
    for (std::int64_t i = 0; i < count; ++i)
        std::memcpy(static_cast<char*>(first.out) + rows[i] * row_bytes, out + i * row_bytes,
                    static_cast<std::size_t>(row_bytes));
    return status;
}

bool is_valid(const Forward& first, const Experts& call) {
    const bool sizes = call.experts >= 0 && call.rows >= 0 && call.top_k > 0 &&
                       (call.index_bytes == 4 || call.index_bytes == 8) && first.out_features >= 0;
    // The partial derivatives of rows that are not consecutive would have to be scattered; training sorts its rows.
    return sizes && first.n_masks > 0 && first.out_stride == first.out_features && (!first.partials || call.is_sorted);
}

}  // namespace

Status forward_experts(const Forward& first, const Experts& call, ParallelFor parallel_for) {
    if (!is_valid(first, call) || !parallel_for) return Status::invalid_argument;
    const std::int64_t bytes = call.rows * first.out_features * bytes_of(first.dtype);
    if (bytes == 0) return Status::ok;
    std::memset(first.out, 0, static_cast<std::size_t>(bytes));
    if (first.partials) std::memset(first.partials, 0, static_cast<std::size_t>(bytes * partials_of(first)));
    Buffers buffers;
    return for_each_expert(call, [&](std::int64_t expert, const std::int64_t* rows, std::int64_t count) {
        return run_layer(first, call, parallel_for, buffers, expert, rows, count);
    });
}

}  // namespace mglu::cpu

MGLU_EXPORT std::int32_t mglu_cpu_forward_experts(const mglu::cpu::Forward* first, const mglu::cpu::Experts* call,
                                                  mglu::cpu::ParallelFor parallel_for) {
    return static_cast<std::int32_t>(mglu::cpu::forward_experts(*first, *call, parallel_for));
}
