// Reads and makes torch's tensors through torch's stable C interface.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "tensor.h"

namespace mglu {

inline void raise_unless_ok(AOTITorchError error, const char* what) {
    if (error != AOTI_TORCH_SUCCESS) throw std::runtime_error(std::string("mglu: torch refused ") + what);
}

// A Handle owns a tensor, and deletes it by this function object.
struct DeleteTensor {
    void operator()(AtenTensorHandle handle) const { aoti_torch_delete_tensor_object(handle); }
};
using Handle = std::unique_ptr<AtenTensorOpaque, DeleteTensor>;

// Returns a view of a handle's tensor. The handle must outlive the view.
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

// Returns a view of an argument. Throws std::invalid_argument unless the tensor is strided and its storage holds all
// its elements. A storage may be too small because FSDP, for example, has resized it.
inline Tensor view_argument(AtenTensorHandle handle, const char* argument) {
    bool is_defined = false;
    std::int32_t layout = 0;
    std::int64_t offset = 0, storage_bytes = 0;
    raise_unless_ok(aoti_torch_is_defined(handle, &is_defined), "whether a tensor is defined");
    if (!is_defined) refuse(std::string(argument) + ": got None, must be a tensor");
    raise_unless_ok(aoti_torch_get_layout(handle, &layout), "a tensor's layout");
    if (layout != aoti_torch_layout_strided())
        refuse(std::string(argument) +
               ": got a sparse tensor or one of another layout, must be a dense tensor (strided)");
    const Tensor tensor = view(handle);
    if (tensor.elements() == 0) return tensor;
    raise_unless_ok(aoti_torch_get_storage_offset(handle, &offset), "a tensor's offset");
    raise_unless_ok(aoti_torch_get_storage_size(handle, &storage_bytes), "a tensor's storage");
    std::int64_t needed = offset + 1;
    for (std::int64_t i = 0; i < tensor.dims; ++i) needed += (tensor.sizes[i] - 1) * tensor.strides[i];
    needed *= static_cast<std::int64_t>(aoti_torch_dtype_element_size(static_cast<std::int32_t>(tensor.dtype)));
    if (storage_bytes < needed)
        refuse(std::string(argument) + ": got a tensor of shape " + tensor.shape() + " whose storage has " +
               std::to_string(storage_bytes) + " bytes, must have " + std::to_string(needed) +
               "; the storage was resized");
    return tensor;
}

// Allocates a contiguous tensor on the device of `like`.
inline Handle empty(const std::vector<std::int64_t>& sizes, Scalar dtype, const Tensor& like) {
    std::vector<std::int64_t> strides(sizes.size(), 1);
    for (std::size_t i = sizes.size(); i-- > 1;) strides[i - 1] = strides[i] * (sizes[i] > 1 ? sizes[i] : 1);
    AtenTensorHandle handle = nullptr;
    raise_unless_ok(aoti_torch_empty_strided(static_cast<std::int64_t>(sizes.size()), sizes.data(), strides.data(),
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
