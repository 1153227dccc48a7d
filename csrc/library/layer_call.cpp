#include "layer_call.h"

#include <vector>

#include "layer.h"

// Weak: a torch without CUDA does not have it, and is what this library may be built with.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(std::int32_t device, void** stream);

namespace mglu {

namespace {

// Replaces a tensor by a contiguous copy, which `owner` keeps.
void make_contiguous(Tensor& tensor, AtenTensorHandle handle, Handle& owner) {
    owner = contiguous(tensor, handle);
    tensor = view(owner.get());
}

// Memory of torch's for kernels. Freed or replaced while they may still run, and yet safe: on their stream, whoever gets it
// next runs after them.
class Workspace {
  public:
    explicit Workspace(const Tensor& like) : like_(like) {}
    static void* allocate(std::int64_t bytes, void* workspace) {
        auto* self = static_cast<Workspace*>(workspace);
        self->held_ = empty({bytes}, Scalar::uint8, self->like_);
        return view(self->held_.get()).data;
    }

  private:
    const Tensor& like_;
    Handle held_;
};

// Threads of torch's pool, and the stream that the caller's other work is on.
Executor executor_for(const Tensor& tensor) {
    Executor executor{torch_parallel_for};
    if (tensor.device == Device::cuda) {
        if (aoti_torch_get_current_cuda_stream == nullptr) throw std::runtime_error("mglu: this torch has no CUDA");
        raise_unless_ok(aoti_torch_get_current_cuda_stream(tensor.device_index, &executor.stream), "its stream");
    }
    return executor;
}

// Makes a GPU tensor's device the current one for as long as it lives.
class DeviceGuard {
  public:
    explicit DeviceGuard(const Tensor& tensor) {
        if (tensor.device == Device::cuda)
            raise_unless_ok(aoti_torch_create_device_guard(tensor.device_index, &guard_), "its device");
    }
    DeviceGuard(const DeviceGuard&) = delete;
    DeviceGuard& operator=(const DeviceGuard&) = delete;
    ~DeviceGuard() {
        if (guard_ != nullptr) aoti_torch_delete_device_guard(guard_);
    }

  private:
    DeviceGuardHandle guard_ = nullptr;
};

// The byte 1 where a value is above 0, by its bits: NaN is not.
template <typename Bits>
void positive(const Tensor& logits, std::uint8_t* bytes, Bits infinity) {
    const auto* data = static_cast<const Bits*>(logits.data);
    for (std::int64_t i = 0; i < logits.elements(); ++i) bytes[i] = data[i] != 0 && data[i] <= infinity;
}

}  // namespace

Handle pack_masks(AtenTensorHandle handle) {
    const Tensor masks = view(handle);
    check_masks(masks);
    Handle result = empty(packed_sizes(masks), Scalar::uint8, masks);
    pack_masks(masks, view(result.get()), executor_for(masks));
    return result;
}

Handle pack_logits(AtenTensorHandle handle) {
    Tensor logits = view(handle);
    check_masks(logits);
    Handle copy;
    if (!logits.is_contiguous()) make_contiguous(logits, handle, copy);
    Handle bits = empty({logits.sizes, logits.sizes + logits.dims}, Scalar::boolean, logits);
    auto* bytes = static_cast<std::uint8_t*>(view(bits.get()).data);
    switch (logits.dtype) {
        case Scalar::float16: positive<std::uint16_t>(logits, bytes, 0x7C00); break;
        case Scalar::bfloat16: positive<std::uint16_t>(logits, bytes, 0x7F80); break;
        case Scalar::float32: positive<std::uint32_t>(logits, bytes, 0x7F800000); break;
        case Scalar::float64: positive<std::uint64_t>(logits, bytes, 0x7FF0000000000000); break;
        default: throw std::invalid_argument(std::string("mask_logits: got dtype ") + name(logits.dtype) + ", must be floating");
    }
    return pack_masks(bits.get());
}

Handle unpack_masks(AtenTensorHandle handle, std::int64_t in_features) {
    const Tensor packed = view(handle);
    check_packed(packed, in_features);
    Handle result = empty({packed.sizes[2], packed.sizes[0], in_features}, Scalar::boolean, packed);
    unpack_masks(packed, in_features, view(result.get()), executor_for(packed));
    return result;
}

Handle forward(AtenTensorHandle x, AtenTensorHandle weight, AtenTensorHandle packed_masks, std::string_view activation,
               AtenTensorHandle route_weights) {
    Tensor route;
    if (route_weights != nullptr) route = view(route_weights);
    Layer layer{view(x), view(weight), view(packed_masks), activation, route_weights != nullptr ? &route : nullptr};
    check(layer);
    Handle copies[4];
    if (needs_copy_of_x(layer)) make_contiguous(layer.x, x, copies[0]);
    if (needs_copy_of_weight(layer)) make_contiguous(layer.weight, weight, copies[1]);
    if (needs_copy_of_masks(layer)) make_contiguous(layer.packed_masks, packed_masks, copies[2]);
    if (needs_copy_of_route_weights(layer)) make_contiguous(route, route_weights, copies[3]);
    const DeviceGuard guard(layer.x);
    Handle result = empty(result_of(layer), layer.x.dtype, layer.x);
    Workspace workspace(layer.x);
    Executor executor = executor_for(layer.x);
    executor.allocate = Workspace::allocate;
    executor.context = &workspace;
    forward(layer, view(result.get()), executor);
    return result;
}

}  // namespace mglu
