#include "torch_call.h"

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>
#include <torch/csrc/stable/accelerator.h>

#include <optional>
#include <utility>
#include <vector>

#include "experts.h"
#include "forward.h"
#include "layer_call.h"
#include "masks.h"

// This declaration is weak, because the library may be built with a torch without CUDA, which lacks the function.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(std::int32_t device, void** stream);

namespace mglu {

namespace {

// Returns an Executor with torch's thread pool and, for a tensor on a GPU, torch's current stream.
Executor executor_for(const Tensor& tensor) {
    Executor executor{torch_parallel_for};
    if (tensor.device == Device::cuda) {
        if (aoti_torch_get_current_cuda_stream == nullptr) throw std::runtime_error("mglu: this torch has no CUDA");
        raise_unless_ok(aoti_torch_get_current_cuda_stream(tensor.device_index, &executor.stream), "its stream");
    }
    return executor;
}

// Allocates a tensor on x's device, in x's dtype, which `compute` fills.
template <typename Compute>
Handle result_of(const std::vector<std::int64_t>& sizes, const Tensor& x, const Compute& compute) {
    std::optional<torch::stable::accelerator::DeviceGuard> guard;
    if (x.device == Device::cuda) guard.emplace(x.device_index);
    Handle result = empty(sizes, x.dtype, x), workspace;
    Executor executor = executor_for(x);
    // The memory may be freed while kernels still use it, since later kernels that reuse it are launched on the same
    // stream.
    executor.allocate = [&](std::int64_t bytes) {
        workspace = empty({bytes}, Scalar::uint8, x);
        return view(workspace.get()).data;
    };
    compute(view(result.get()), executor);
    return result;
}

// Writes 1 for each value above 0, and 0 for all others. A float is above 0 if its bits, read as an unsigned integer,
// lie between 1 and the bits of infinity; the bits of NaN and of negative numbers are larger.
template <typename Bits>
void positive(const Tensor& logits, std::uint8_t* bytes, Bits infinity) {
    const auto* data = static_cast<const Bits*>(logits.data);
    for (std::int64_t i = 0; i < logits.elements(); ++i) bytes[i] = data[i] != 0 && data[i] <= infinity;
}

// Returns a view of an argument or, if `copy` is true, of a contiguous copy that `owner` keeps.
Tensor view_or_copy(AtenTensorHandle handle, const char* argument, bool copy, Handle& owner) {
    if (!copy) return view_argument(handle, argument);
    owner = contiguous_copy(handle);
    return view(owner.get());
}

// Wraps a matrix that the caller owns in a handle.
Handle matrix(void* data, std::int64_t rows, std::int64_t columns, std::int64_t row_stride, std::int64_t column_stride,
              Scalar dtype) {
    const std::int64_t sizes[] = {rows, columns}, strides[] = {row_stride, column_stride};
    AtenTensorHandle handle = nullptr;
    raise_unless_ok(aoti_torch_create_tensor_from_blob(data, 2, sizes, strides, 0, static_cast<std::int32_t>(dtype),
                                                       static_cast<std::int32_t>(Device::cpu), -1, &handle),
                    "a matrix");
    return Handle(handle);
}

// Multiplies y by an expert's transposed weight with torch's mm, as torch.nn.functional.linear does in Python.
void multiply(const Tensor& y, const Tensor& weight, std::int64_t expert, const Tensor& out) {
    const auto [d, h] = std::pair(weight.sizes[1], weight.sizes[2]);
    auto* data = static_cast<char*>(weight.data) + expert * weight.strides[0] * item_bytes(weight.dtype);
    const Handle rows = matrix(y.data, y.sizes[0], h, h, 1, y.dtype);
    const Handle transposed = matrix(data, h, d, weight.strides[2], weight.strides[1], weight.dtype);
    const Handle result = matrix(out.data, y.sizes[0], d, d, 1, out.dtype);
    raise_unless_ok(aoti_torch_cpu_mm_out(result.get(), rows.get(), transposed.get()), "a product of matrices");
}

}  // namespace

Handle pack_masks(AtenTensorHandle handle) {
    const Tensor masks = view_argument(handle, "masks");
    check_masks(masks);
    Handle result = empty(packed_sizes(masks), Scalar::uint8, masks);
    pack_masks(masks, view(result.get()), executor_for(masks));
    return result;
}

Handle pack_logits(AtenTensorHandle handle) {
    Tensor logits = view_argument(handle, "mask_logits");
    check_masks(logits);
    Handle copy;
    logits = view_or_copy(handle, "mask_logits", !logits.is_contiguous(), copy);
    Handle bits = empty({logits.sizes, logits.sizes + logits.dims}, Scalar::boolean, logits);
    auto* bytes = static_cast<std::uint8_t*>(view(bits.get()).data);
    switch (logits.dtype) {
        case Scalar::float16: positive<std::uint16_t>(logits, bytes, 0x7C00); break;
        case Scalar::bfloat16: positive<std::uint16_t>(logits, bytes, 0x7F80); break;
        case Scalar::float32: positive<std::uint32_t>(logits, bytes, 0x7F800000); break;
        case Scalar::float64: positive<std::uint64_t>(logits, bytes, 0x7FF0000000000000); break;
        default: refuse_dtype("mask_logits", logits.dtype, "must be floating");
    }
    return pack_masks(bits.get());
}

Handle unpack_masks(AtenTensorHandle handle, std::int64_t in_features) {
    const Tensor packed = view_argument(handle, "packed_masks");
    check_packed(packed, in_features);
    Handle result = empty({packed.sizes[2], packed.sizes[0], in_features}, Scalar::boolean, packed);
    unpack_masks(packed, in_features, view(result.get()), executor_for(packed));
    return result;
}

Handle forward(const Given<AtenTensorHandle>& given) {
    Handle owners[6];
    const auto viewed = [&](const Copies& copies) {
        Given<Tensor> views{Options(given)};
        views.x = view_or_copy(given.x, "x", copies.x, owners[0]);
        views.weight = view_or_copy(given.weight, "weight", copies.weight, owners[1]);
        views.packed_masks = view_or_copy(given.packed_masks, "packed_masks", copies.packed_masks, owners[2]);
        if (given.mask_weights)
            views.mask_weights = view_or_copy(*given.mask_weights, "mask_weights", copies.mask_weights, owners[3]);
        if (given.weight_scale)
            views.weight_scale = view_or_copy(*given.weight_scale, "weight_scale", copies.weight_scale, owners[4]);
        const char* routing = given.is_sorted ? "offs" : "expert_ids";
        if (given.routing) views.routing = view_or_copy(*given.routing, routing, copies.routing, owners[5]);
        return views;
    };
    const auto computed = [&](const auto& describe_given) {
        auto call = describe_given(viewed({}));
        if (const Copies copies = needed_copies(call); copies.any()) call = describe_given(viewed(copies));
        return result_of(call.result_sizes(), view(given.x),
                         [&](const Tensor& out, const Executor& executor) { forward(call, out, executor); });
    };
    return given.routing ? computed(describe_experts) : computed(describe);
}

Handle experts_down(AtenTensorHandle y, AtenTensorHandle weight, AtenTensorHandle expert_ids,
                    AtenTensorHandle expert_weights, const std::optional<AtenTensorHandle>& weight_scale,
                    std::string_view weight_format) {
    const Tensor given = view_argument(weight, "weight");
    const bool on_gpu = given.device == Device::cuda;
    Handle owners[5];
    const auto describe_with = [&](bool copy) {
        const auto as_needed = [&](AtenTensorHandle handle, const char* argument, int owner) {
            const auto is_fine = [&](const Tensor& x) { return x.is_contiguous() && (!on_gpu || x.is_aligned()); };
            return view_or_copy(handle, argument, copy && !is_fine(view(handle)), owners[owner]);
        };
        std::optional<Tensor> scale;
        if (weight_scale) scale = as_needed(*weight_scale, "weight_scale", 4);
        const bool copies_weight = copy && given.last_size() > 1 && given.last_stride() != 1;
        return describe_down(
            as_needed(y, "y", 0),
            on_gpu ? as_needed(weight, "weight", 1) : view_or_copy(weight, "weight", copies_weight, owners[1]),
            as_needed(expert_ids, "expert_ids", 2), as_needed(expert_weights, "expert_weights", 3), scale,
            weight_format);
    };
    describe_with(false);
    const DownCall call = describe_with(true);
    return result_of(call.result_sizes(), call.y, [&](const Tensor& out, const Executor& executor) {
        experts_down(call, out, executor, [&](const Tensor& rows, std::int64_t expert, const Tensor& product) {
            multiply(rows, given, expert, product);
        });
    });
}

}  // namespace mglu
