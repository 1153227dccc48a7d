#include "launch.h"

#include <cstdio>
#include <mutex>
#include <stdexcept>
#include <string>

#include "plan.h"

namespace mglu::cuda {

namespace {

// Returns the code of a dtype in csrc/cuda/element.cuh.
int element(const char* argument, Scalar dtype) {
    switch (dtype) {
        case Scalar::float16: return 0;
        case Scalar::bfloat16: return 1;
        case Scalar::float32: return 2;
        default: refuse_dtype(argument, dtype, "the GPU kernels have float16, bfloat16 and float32");
    }
}

// Returns the current device, or throws if it is too old or the weight too large for 32-bit indices.
const DeviceFacts& device_for(const Tensor& weight, std::int64_t out_features, std::int64_t in_features) {
    if (out_features >= INT32_MAX || in_features >= 1 << 28)
        refuse("weight: got shape " + weight.shape() + ", beyond the kernels' 32-bit indices");
    const DeviceFacts& device = current_device();
    if (device.arch < 80) throw std::runtime_error("mglu: the GPU kernels need compute capability 8.0");
    return device;
}

Layer layer_of(const LayerCall& call, const DeviceFacts& device) {
    const auto& mask_weights = call.mask_weights;
    return {.variant = {.arch = device.arch,
                        .element = element("x", call.x.dtype),
                        .weight_format = static_cast<int>(call.format),
                        .rounds_x = call.rounds_x,
                        .n_masks = static_cast<int>(call.n_masks),
                        .activation = call.activation_code,
                        .mask_weights = mask_weights ? element("mask_weights", mask_weights->dtype) : -1},
            .out_features = call.out_features,
            .in_features = call.in_features,
            .is_packed = call.weight.is_contiguous() && call.packed_masks.is_contiguous() && call.weight.is_aligned() &&
                         call.packed_masks.is_aligned()};
}

// Returns the values with which plans compute `rows` rows of a call.
Values values_of(const LayerCall& call, const Layer& layer, std::int64_t rows, const DeviceFacts& device) {
    const std::int64_t item = item_bytes(call.x.dtype), column_stride = call.x.last_stride();
    const bool x_is_vectorizable =
        column_stride == 1 && call.x.is_aligned() && (rows == 1 || call.x_row_stride * item % 16 == 0);
    return {.rows = rows,
            .multiprocessors = device.sms,
            .shared_bytes_per_sm = device.shared_bytes_per_sm,
            .out_features = call.out_features,
            .in_features = call.in_features,
            .x_row_stride = call.x_row_stride,
            .x_column_stride = column_stride,
            .x_is_vectorizable = x_is_vectorizable,
            .weight_row_stride = call.weight.strides[0],
            .weight_column_stride = call.weight.strides[1],
            .mask_row_stride = call.packed_masks.strides[0],
            .mask_octet_stride = call.packed_masks.strides[1],
            .mask_stride = call.packed_masks.strides[2],
            .mask_weight_row_stride = call.mask_weight_row_stride,
            .mask_weight_column_stride = call.mask_weights ? call.mask_weights->last_stride() : 0,
            .element = layer.variant.element,
            .element_bytes = item,
            .weight_format = layer.variant.weight_format,
            .n_masks = layer.variant.n_masks,
            .activation = layer.variant.activation,
            .mask_weights = layer.variant.mask_weights};
}

const void* address(const Tensor& tensor, std::int64_t offset = 0) {
    return static_cast<const char*>(tensor.data) + offset * item_bytes(tensor.dtype);
}

const void* address(const std::optional<Tensor>& tensor, std::int64_t offset = 0) {
    return tensor ? address(*tensor, offset) : nullptr;
}

// Returns the addresses of a call's tensors, from row `first` of x and of the result on.
Addresses addresses_of(const LayerCall& call, void* out, std::int64_t first = 0) {
    return {{"x", address(call.x, first * call.x_row_stride)},
            {"weight", call.weight.data},
            {"packed_masks", call.packed_masks.data},
            {"mask_weights", address(call.mask_weights, first * call.mask_weight_row_stride)},
            {"weight_scale", address(call.weight_scale)},
            {"out", static_cast<char*>(out) + first * call.out_features * item_bytes(call.x.dtype)}};
}

// Warns, once per process, that a call runs on a kernel that is not tuned for its layer.
void say_that_the_kernel_is_slow(const LayerCall& call) {
    static std::once_flag said;
    std::call_once(said, [&] {
        std::fprintf(
            stderr,
            "mglu: this libmglu_ops.so has no tuned kernel for a layer with weight %s, and uses one for any layer, "
            "several times slower; build it with --arch and --package for this GPU and this model\n",
            call.weight.shape().c_str());
    });
}

// Returns a plan for the rows of a call, or for the first of them, whose number it writes to `values.rows`.
const Plan& plan_of(const LayerCall& call, const Layer& layer, Values& values, const DeviceFacts& device) {
    const Plan* plan = find_plan(layer, values, device);
    if (plan == nullptr)
        refuse("weight: got shape " + call.weight.shape() +
               ", whose rows do not fit into the shared memory of this GPU");
    if (plan->is_for_any_shape()) say_that_the_kernel_is_slow(call);
    return *plan;
}

}  // namespace

void forward(const LayerCall& call, void* out, const Executor& executor) {
    const DeviceFacts& device = device_for(call.weight, call.out_features, call.in_features);
    const Layer layer = layer_of(call, device);
    for (std::int64_t first = 0; first < call.tokens;) {
        Values values = values_of(call, layer, call.tokens - first, device);
        const Plan& plan = plan_of(call, layer, values, device);
        run(plan, values, addresses_of(call, out, first), device, executor);
        first += values.rows;
    }
}

void forward(const ExpertsCall& call, void* out, const Executor& executor) {
    const LayerCall& shared = call.layer;
    const DeviceFacts& device = device_for(shared.weight, shared.out_features, shared.in_features);
    const auto follow = [](const Tensor& tensor, std::int64_t stride) { return stride == tensor.elements(); };
    check_experts(call.experts, call.rows);
    Layer layer = layer_of(shared, device);
    layer.experts = call.experts;
    layer.top_k = call.is_sorted ? 0 : call.top_k;
    layer.is_packed = layer.is_packed &&
                      (call.experts == 1 ||
                       (follow(shared.weight, call.weight_stride) && follow(shared.packed_masks, call.masks_stride) &&
                        (!shared.weight_scale || follow(*shared.weight_scale, call.scale_stride))));
    Values values = values_of(shared, layer, shared.tokens, device);
    values.id_bytes = item_bytes(call.routing.dtype);
    values.experts = call.experts;
    values.top_k = call.top_k;
    values.expert_weight_bytes = call.weight_stride * item_bytes(shared.weight.dtype);
    values.expert_mask_bytes = call.masks_stride;
    values.expert_scale_bytes = shared.weight_scale ? call.scale_stride * item_bytes(shared.weight_scale->dtype) : 0;
    Addresses addresses = addresses_of(shared, out);
    addresses["expert_ids"] = call.routing.data;
    const Plan& plan = plan_of(shared, layer, values, device);
    if (values.rows < shared.tokens)
        refuse("x: got " + std::to_string(shared.tokens) + " rows, must be at most " + std::to_string(values.rows));
    run(plan, values, std::move(addresses), device, executor);
}

void experts_down(const DownCall& call, void* out, const Executor& executor) {
    const std::int64_t tokens = call.y.sizes[0], top_k = call.y.sizes[1], experts = call.weight.sizes[0];
    const std::int64_t out_features = call.weight.sizes[1], in_features = call.y.sizes[2];
    const DeviceFacts& device = device_for(call.weight, out_features, in_features);
    const Layer layer{.variant = {.arch = device.arch,
                                  .element = element("y", call.y.dtype),
                                  .weight_format = static_cast<int>(call.weight_format),
                                  .activation = static_cast<int>(cpu::Activation::identity),
                                  .mask_weights = element("expert_weights", call.expert_weights.dtype)},
                      .out_features = out_features,
                      .in_features = in_features,
                      .experts = experts,
                      .top_k = top_k,
                      .is_packed = true};
    Values values{};
    values.multiprocessors = device.sms;
    values.shared_bytes_per_sm = device.shared_bytes_per_sm;
    values.id_bytes = item_bytes(call.expert_ids.dtype);
    for (std::int64_t first = 0; first < tokens; first += values.rows) {
        values.rows = tokens - first;
        const Plan* plan = find_plan(layer, values, device);
        if (plan == nullptr)
            refuse("weight: got shape " + call.weight.shape() + ", for which this library has no GPU kernel of " +
                   "mglu::experts_down with " + std::to_string(top_k) + " experts a token in " + name(call.y.dtype) +
                   "; build it with --arch and --package for this GPU and this model");
        const std::int64_t pair = first * top_k;
        run(*plan, values,
            {{"y", address(call.y, pair * in_features)},
             {"weight", call.weight.data},
             {"weight_scale", address(call.weight_scale)},
             {"expert_ids", address(call.expert_ids, pair)},
             {"expert_weights", address(call.expert_weights, pair)},
             {"out", static_cast<char*>(out) + first * out_features * item_bytes(call.y.dtype)}},
            device, executor);
    }
}

}  // namespace mglu::cuda
