#include "experts.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <tuple>

#include "../cpu/experts.h"
#include "../cpu/kernels.h"
#include "cuda/launch.h"
#include "formats.h"
#include "forward.h"

namespace mglu {

namespace {

#include "../cpu/element.h"

// --- Checks, with the messages of mglu_ops/checks.py -----------------------------------------------------------------

void check_rank(const char* argument, const Tensor& tensor, std::int64_t dims, const char* shape) {
    if (tensor.dims != dims) refuse(std::string(argument) + ": got shape " + tensor.shape() + ", must be " + shape);
}

void check_experts_of(const char* argument, const Tensor& tensor, const Tensor& weight) {
    if (tensor.dims == 0 || tensor.sizes[0] != weight.sizes[0])
        refuse(std::string(argument) + ": got shape " + tensor.shape() +
               ", must begin with E = " + std::to_string(weight.sizes[0]) + " experts");
}

void check_weight_of_experts(const Tensor& weight) {
    if (weight.dims != 3 || weight.sizes[0] == 0)
        refuse("weight: got shape " + weight.shape() +
               ", must be [E, ...] with the weights of at least 1 expert in 3 sizes");
}

void check_offs(const Tensor& offs, std::int64_t experts, const Tensor& x) {
    if (offs.dtype != Scalar::int32)
        refuse_dtype("offs", offs.dtype, "must be int32, as for torch.nn.functional.grouped_mm");
    if (offs.dims != 1 || offs.sizes[0] != experts)
        refuse("offs: got shape " + offs.shape() + ", must be [" + std::to_string(experts) +
               "], the end of each expert's rows");
    check_device("offs", offs, x);
}

void check_ids(const Tensor& ids, const char* argument, const Tensor& x) {
    if (ids.dtype != Scalar::int32 && ids.dtype != Scalar::int64)
        refuse_dtype("expert_ids", ids.dtype, "must be int32 or int64");
    const std::string tokens = std::to_string(x.sizes[0]);
    if (ids.dims != 2 || ids.sizes[0] != x.sizes[0] || ids.sizes[1] == 0)
        refuse("expert_ids: got shape " + ids.shape() + ", must be [T, K] = [" + tokens + ", K] with K of at least 1");
    check_device("expert_ids", ids, x, argument);
}

// Runs a check of one expert's layer. If the check throws, adds "(of each expert)" to the message.
template <typename Check>
auto check_one_expert(Check check) {
    try {
        return check();
    } catch (const std::invalid_argument& error) {
        refuse(std::string(error.what()) + " (of each expert)");
    }
}

// --- Experts and rows of tensors -------------------------------------------------------------------------------------

char* element(const Tensor& tensor, std::int64_t offset) {
    return static_cast<char*>(tensor.data) + offset * item_bytes(tensor.dtype);
}

// Returns tensor[expert] as a view.
Tensor select_expert(const Tensor& tensor, std::int64_t expert = 0) {
    Tensor view = tensor;
    view.data = element(tensor, expert * tensor.strides[0]);
    view.dims = tensor.dims - 1;
    view.sizes = tensor.sizes + 1;
    view.strides = tensor.strides + 1;
    return view;
}

std::optional<Tensor> select_expert(const std::optional<Tensor>& tensor, std::int64_t expert = 0) {
    return tensor ? std::optional(select_expert(*tensor, expert)) : std::nullopt;
}

// A contiguous matrix that owns its memory.
class Matrix {
  public:
    Matrix(std::int64_t rows, std::int64_t columns, Scalar dtype)
        : sizes_{rows, columns}, strides_{columns, 1}, dtype_(dtype), row_bytes_(columns * item_bytes(dtype)) {
        memory_.reset(new char[static_cast<std::size_t>(rows * row_bytes_)]);
    }
    Matrix(const Matrix&) = delete;

    Tensor tensor() const { return {memory_.get(), 2, sizes_.data(), strides_.data(), dtype_, Device::cpu, -1}; }

    // Copies row rows[i] of a contiguous tensor to row i of this matrix.
    void gather(const Tensor& from, std::span<const std::int64_t> rows) {
        for (std::size_t i = 0; i < rows.size(); ++i)
            std::memcpy(memory_.get() + i * row_bytes_, element(from, rows[i] * sizes_[1]), row_bytes_);
    }

  private:
    std::array<std::int64_t, 2> sizes_, strides_;
    Scalar dtype_;
    std::size_t row_bytes_;
    std::unique_ptr<char[]> memory_;
};

// The rows of a call over experts, for csrc/cpu.
cpu::Experts rows_of_experts(const Tensor& index, bool is_sorted, std::int64_t experts, std::int64_t rows,
                             std::int64_t top_k) {
    cpu::Experts found{};
    found.index = index.data;
    found.index_bytes = item_bytes(index.dtype);
    found.is_sorted = is_sorted;
    found.experts = experts;
    found.rows = rows;
    found.top_k = top_k;
    return found;
}

// --- experts_down ----------------------------------------------------------------------------------------------------

// With dense weights, experts with more rows than this use the caller's `product`
// (mglu_ops/backends/cpu/experts_down.py says why).
constexpr std::int64_t kMostRows = 8;

float float_at(const Tensor& tensor, std::int64_t i) {
    switch (tensor.dtype) {
        case Scalar::float16: return to_float(static_cast<const Float16*>(tensor.data)[i]);
        case Scalar::bfloat16: return to_float(static_cast<const BFloat16*>(tensor.data)[i]);
        case Scalar::float64: return static_cast<float>(static_cast<const double*>(tensor.data)[i]);
        default: return static_cast<const float*>(tensor.data)[i];
    }
}

// Describes a layer without masks, which multiplies y by an expert's transposed weight. Its result is float32.
LayerCall product_layer(const DownCall& call, std::int64_t expert, const Tensor& y) {
    static constexpr std::int64_t sizes[] = {0, 0, 0}, strides[] = {0, 0, 1};
    LayerCall layer{};
    layer.x = y;
    layer.weight = select_expert(call.weight, expert);
    layer.packed_masks = {nullptr, 3, sizes, strides, Scalar::uint8, Device::cpu, -1};
    layer.weight_scale = select_expert(call.weight_scale, expert);
    layer.format = call.weight_format;
    layer.tokens = y.sizes[0];
    layer.out_features = call.weight.sizes[1];
    layer.in_features = layer.x_row_stride = y.sizes[1];
    return layer;
}

template <typename Element>
void down(const DownCall& call, const Tensor& out, const Executor& executor, const Product& product) {
    const std::int64_t tokens = call.y.sizes[0], top_k = call.y.sizes[1], in_features = call.y.sizes[2];
    const std::int64_t out_features = call.weight.sizes[1];
    const bool has_library = call.weight_format == WeightFormat::dense && call.y.dtype != Scalar::float16;
    std::vector<float> terms(static_cast<std::size_t>(tokens * top_k * out_features));
    const auto multiply = [&](std::int64_t expert, const std::int64_t* rows, std::int64_t count) {
        const bool uses_library = has_library && count > kMostRows;
        Matrix y(count, in_features, call.y.dtype);
        const Matrix result(count, out_features, uses_library ? call.y.dtype : Scalar::float32);
        y.gather(call.y, std::span(rows, static_cast<std::size_t>(count)));
        const auto keep = [&](const auto* products) {
            for (std::int64_t i = 0; i < count; ++i) {
                const float factor = float_at(call.expert_weights, rows[i]);
                for (std::int64_t c = 0; c < out_features; ++c)
                    terms[rows[i] * out_features + c] = to_float(products[i * out_features + c]) * factor;
            }
        };
        if (uses_library) {
            product(y.tensor(), expert, result.tensor());
            keep(static_cast<const Element*>(result.tensor().data));
        } else {
            forward(product_layer(call, expert, y.tensor()), result.tensor(), executor);
            keep(static_cast<const float*>(result.tensor().data));
        }
        return cpu::Status::ok;
    };
    const cpu::Experts experts = rows_of_experts(call.expert_ids, false, call.weight.sizes[0], tokens * top_k, top_k);
    if (cpu::for_each_expert(experts, multiply) != cpu::Status::ok) throw std::bad_alloc();
    auto* results = static_cast<Element*>(out.data);
    for (std::int64_t t = 0; t < tokens; ++t)
        for (std::int64_t c = 0; c < out_features; ++c) {
            float sum = terms[t * top_k * out_features + c];
            for (std::int64_t k = 1; k < top_k; ++k) sum += terms[(t * top_k + k) * out_features + c];
            results[t * out_features + c] = from_float<Element>(sum);
        }
}

}  // namespace

std::vector<std::int64_t> ExpertsCall::result_sizes() const {
    if (is_sorted) return {rows, layer.out_features};
    return {routing.sizes[0], top_k, layer.out_features};
}

ExpertsCall describe_experts(const Given<Tensor>& given) {
    const auto& [x, weight, packed_masks] = std::tie(given.x, given.weight, given.packed_masks);
    const Tensor& routing = *given.routing;
    const bool is_sorted = given.is_sorted;
    check_rank("x", x, 2, is_sorted ? "[S, in_features]" : "[T, in_features]");
    check_weight_of_experts(weight);
    check_experts_of("packed_masks", packed_masks, weight);
    if (given.weight_scale) check_experts_of("weight_scale", *given.weight_scale, weight);
    is_sorted ? check_offs(routing, weight.sizes[0], x) : check_ids(routing, "x", x);
    Given<Tensor> one = given;
    one.weight = select_expert(weight);
    one.packed_masks = select_expert(packed_masks);
    one.weight_scale = select_expert(given.weight_scale);
    one.mask_weights.reset();
    ExpertsCall call{};
    call.layer = check_one_expert([&] { return describe(one); });
    call.routing = routing;
    call.is_sorted = is_sorted;
    call.experts = weight.sizes[0];
    call.top_k = is_sorted ? 1 : routing.sizes[1];
    call.rows = x.sizes[0] * call.top_k;
    call.layer.mask_weights = given.mask_weights;
    if (given.mask_weights) check_mask_weights(call.layer, call.result_sizes());
    call.weight_stride = weight.strides[0];
    call.masks_stride = packed_masks.strides[0];
    call.scale_stride = given.weight_scale ? given.weight_scale->strides[0] : 0;
    return call;
}

Copies needed_copies(const ExpertsCall& call) {
    Copies copies = needed_copies(call.layer);
    copies.mask_weights = call.layer.mask_weights && !call.layer.mask_weights->is_contiguous();
    copies.routing = !call.routing.is_contiguous();
    return copies;
}

void forward(const ExpertsCall& call, const Tensor& out, const Executor& executor) {
    if (out.elements() == 0) return;
    const LayerCall& shared = call.layer;
    if (shared.x.device == Device::cuda) return cuda::forward(call, out.data, executor);
    cpu::Experts experts = rows_of_experts(call.routing, call.is_sorted, call.experts, call.rows, call.top_k);
    experts.weight_bytes = call.weight_stride * item_bytes(shared.weight.dtype);
    experts.mask_bytes = call.masks_stride;
    if (shared.weight_scale) experts.scale_bytes = call.scale_stride * item_bytes(shared.weight_scale->dtype);
    forward_on_cpu(shared, &experts, out, executor);
}

DownCall describe_down(const Tensor& y, const Tensor& weight, const Tensor& expert_ids, const Tensor& expert_weights,
                       const std::optional<Tensor>& weight_scale, std::string_view weight_format) {
    const Format& format = find_format(weight_format);
    check_rank("y", y, 3, "[T, K, in_features]");
    check_weight_of_experts(weight);
    if (weight_scale) check_experts_of("weight_scale", *weight_scale, weight);
    check_ids(expert_ids, "y", y);
    if (!is_floating(expert_weights.dtype))
        refuse_dtype("expert_weights", expert_weights.dtype, "must be float16, bfloat16, float32 or float64");
    const auto begins_with_ids = [&](const Tensor& tensor) {
        return std::equal(tensor.sizes, tensor.sizes + 2, expert_ids.sizes);
    };
    if (!begins_with_ids(y))
        refuse("y: got shape " + y.shape() + ", must begin with expert_ids' " + expert_ids.shape());
    if (expert_weights.dims != 2 || !begins_with_ids(expert_weights))
        refuse("expert_weights: got shape " + expert_weights.shape() + ", must be expert_ids' " + expert_ids.shape());
    check_device("expert_weights", expert_weights, y, "y");
    check_one_expert([&] {
        check_x_and_weight("y", y, select_expert(weight), format);
        check_device("weight", weight, y, "y");
        check_scale(select_expert(weight_scale), y, select_expert(weight), format);
    });
    return {y, weight, expert_ids, expert_weights, weight_scale, format.code};
}

void experts_down(const DownCall& call, const Tensor& out, const Executor& executor, const Product& product) {
    if (out.elements() == 0) return;
    if (call.y.device == Device::cuda) return cuda::experts_down(call, out.data, executor);
    switch (cpu_dtype("y", call.y.dtype)) {
        case cpu::DType::float32: return down<float>(call, out, executor, product);
        case cpu::DType::bfloat16: return down<BFloat16>(call, out, executor, product);
        case cpu::DType::float16: return down<Float16>(call, out, executor, product);
    }
}

}  // namespace mglu
