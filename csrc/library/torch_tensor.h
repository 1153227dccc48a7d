// torch's tensors through its C interface, which does not change from one version to the next.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "tensor.h"

namespace mglu {

inline void raise_unless_ok(AOTITorchError error, const char* what) {
    if (error != AOTI_TORCH_SUCCESS) throw std::runtime_error(std::string("mglu: torch refused ") + what);
}

// Owns a handle.
class Handle {
  public:
    Handle() = default;
    explicit Handle(AtenTensorHandle handle) : handle_(handle) {}
    Handle(Handle&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
    Handle& operator=(Handle&& other) noexcept {
        std::swap(handle_, other.handle_);
        return *this;
    }
    ~Handle() {
        if (handle_ != nullptr) aoti_torch_delete_tensor_object(handle_);
    }
    AtenTensorHandle get() const { return handle_; }
    AtenTensorHandle release() { return std::exchange(handle_, nullptr); }

  private:
    AtenTensorHandle handle_ = nullptr;
};

// The tensor of a handle, which must outlive it.
inline Tensor view(AtenTensorHandle handle) {
    Tensor tensor;
    std::int64_t *sizes = nullptr, *strides = nullptr;
    std::int32_t dtype = 0, device = 0;
    raise_unless_ok(aoti_torch_get_dim(handle, &tensor.dims), "a tensor's rank");
    raise_unless_ok(aoti_torch_get_sizes(handle, &sizes), "a tensor's sizes");
    raise_unless_ok(aoti_torch_get_strides(handle, &strides), "a tensor's strides");
    raise_unless_ok(aoti_torch_get_dtype(handle, &dtype), "a tensor's dtype");
    raise_unless_ok(aoti_torch_get_device_type(handle, &device), "a tensor's device");
    raise_unless_ok(aoti_torch_get_device_index(handle, &tensor.device_index), "a tensor's device index");
    raise_unless_ok(aoti_torch_get_data_ptr(handle, &tensor.data), "a tensor's data");
    tensor.sizes = sizes;
    tensor.strides = strides;
    tensor.dtype = static_cast<Scalar>(dtype);
    tensor.device = static_cast<Device>(device);
    return tensor;
}

// A new contiguous tensor on the device of `like`.
inline Handle empty(const std::vector<std::int64_t>& sizes, Scalar dtype, const Tensor& like) {
    std::vector<std::int64_t> strides(sizes.size(), 1);
    for (std::size_t i = sizes.size(); i-- > 1;) strides[i - 1] = strides[i] * (sizes[i] > 1 ? sizes[i] : 1);
    AtenTensorHandle handle = nullptr;
    raise_unless_ok(
        aoti_torch_empty_strided(static_cast<std::int64_t>(sizes.size()), sizes.data(), strides.data(),
                                 static_cast<std::int32_t>(dtype), static_cast<std::int32_t>(like.device),
                                 like.device_index, &handle),
        "a new tensor");
    return Handle(handle);
}

inline Handle contiguous_copy(AtenTensorHandle handle) {
    const Tensor tensor = view(handle);
    Handle copy = empty({tensor.sizes, tensor.sizes + tensor.dims}, tensor.dtype, tensor);
    raise_unless_ok(aoti_torch_copy_(copy.get(), handle, /*non_blocking=*/0), "a copy");
    return copy;
}

}  // namespace mglu
