#include "layer.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

#include "../cpu/mglu_cpu.h"
#include "cuda/launch.h"

namespace mglu {

namespace {

constexpr std::int64_t kMaxMasks = 16;
constexpr std::string_view kActivations[] = {"silu", "gelu", "gelu_tanh", "relu", "sigmoid", "tanh", "identity"};

[[noreturn]] void refuse(const std::string& words) { throw std::invalid_argument(words); }

std::string text(std::int64_t number) { return std::to_string(number); }

std::string device_name(const Tensor& tensor) {
    if (tensor.device == Device::cpu) return "cpu";
    return (tensor.device == Device::cuda ? "cuda:" : "device:") + text(tensor.device_index);
}

bool is_floating(Scalar dtype) {
    return dtype == Scalar::float16 || dtype == Scalar::bfloat16 || dtype == Scalar::float32 || dtype == Scalar::float64;
}

int activation_number(std::string_view activation) {
    const auto* found = std::find(std::begin(kActivations), std::end(kActivations), activation);
    if (found != std::end(kActivations)) return static_cast<int>(found - std::begin(kActivations));
    std::string names;
    for (std::string_view known : kActivations) names += (names.empty() ? "" : ", ") + std::string(known);
    refuse("activation: got '" + std::string(activation) + "', must be one of " + names);
}

std::int64_t packed_width(std::int64_t in_features) { return in_features / 8 + (in_features % 8 != 0); }

void check_same_device(const char* what, const Tensor& tensor, const Tensor& x) {
    if (tensor.device != x.device || (x.device == Device::cuda && tensor.device_index != x.device_index))
        refuse(std::string(what) + ": got device " + device_name(tensor) + ", must be x's device " + device_name(x));
}

// The product of all sizes but the last; torch has seen to it that it fits.
std::int64_t tokens_of(const Tensor& tensor) {
    std::int64_t tokens = 1;
    for (std::int64_t i = 0; i + 1 < tensor.dims; ++i) tokens *= tensor.sizes[i];
    return tokens;
}

// The distance of rows of a tensor folded to two dimensions. (Strides of sizes of 1 say nothing.)
std::int64_t row_stride(const Tensor& tensor) { return tensor.dims == 2 ? tensor.strides[0] : tensor.last_size(); }

bool folds(const Tensor& tensor, bool any_column_stride) {
    const bool dense_columns = any_column_stride || tensor.last_size() <= 1 || tensor.strides[tensor.dims - 1] == 1;
    return tensor.dims <= 2 ? dense_columns : tensor.is_contiguous();
}

// Whether rows of 16-bit elements are whole 16-byte vectors, which a contiguous copy would be at most.
bool in_vectors(const Tensor& x) {
    const std::int64_t width = x.last_size(), pitch = row_stride(x);
    const bool could_be = width % 8 == 0 && (x.dtype == Scalar::float16 || x.dtype == Scalar::bfloat16);
    const bool rows = tokens_of(x) <= 1 || (pitch % 8 == 0 && pitch >= width);
    return !could_be || (rows && x.strides[x.dims - 1] == 1 && reinterpret_cast<std::uintptr_t>(x.data) % 16 == 0);
}

cpu::DType cpu_dtype(Scalar dtype) {
    switch (dtype) {
        case Scalar::float32: return cpu::DType::float32;
        case Scalar::bfloat16: return cpu::DType::bfloat16;
        case Scalar::float16: return cpu::DType::float16;
        default: refuse(std::string("x: got dtype ") + name(dtype) + ", which this library has no CPU kernel for; it "
                        "has float16, bfloat16 and float32 (mglu_ops in Python takes float64)");
    }
}

void raise_unless_ok(cpu::Status status) {
    if (status != cpu::Status::ok) throw std::runtime_error(std::string("mglu: ") + cpu::status_message(status));
}

void forward_cpu(const Layer& layer, const Tensor& out, const Executor& executor) {
    cpu::Forward call{};
    call.x = layer.x.data;
    call.weight = layer.weight.data;
    call.packed_masks = static_cast<const std::uint8_t*>(layer.packed_masks.data);
    call.out = out.data;
    call.tokens = tokens_of(layer.x);
    call.out_features = layer.weight.sizes[0];
    call.in_features = layer.weight.sizes[1];
    call.n_masks = layer.packed_masks.sizes[2];
    call.x_stride = row_stride(layer.x);
    call.weight_stride = layer.weight.strides[0];
    call.mask_stride = layer.packed_masks.strides[0];
    call.out_stride = call.out_features;
    call.dtype = call.route_dtype = cpu_dtype(layer.x.dtype);
    call.activation = static_cast<cpu::Activation>(activation_number(layer.activation));
    call.isa = cpu::Isa::best;
    if (const Tensor* route = layer.route_weights) {
        call.route_weights = route->data;
        call.route_stride = row_stride(*route);
        call.route_mask_stride = route->strides[route->dims - 1];
        call.route_dtype = cpu_dtype(route->dtype);
    }
    raise_unless_ok(cpu::forward(call, executor.parallel_for));
}

// Copies masks [n_masks, d, h] or [d, h] to bytes of 0 and 1, in order; false at a value that is neither. 16-bit floats
// are compared as bits, and have a second zero.
template <typename Element>
bool to_bytes(const Tensor& masks, std::uint8_t* bytes, Element one, Element negative_zero = 0) {
    const auto* data = static_cast<const Element*>(masks.data);
    const bool three = masks.dims == 3;
    const std::int64_t* sizes = masks.sizes + (three ? 1 : 0);
    const std::int64_t* strides = masks.strides + (three ? 1 : 0);
    for (std::int64_t i = 0; i < (three ? masks.sizes[0] : 1); ++i)
        for (std::int64_t r = 0; r < sizes[0]; ++r)
            for (std::int64_t k = 0; k < sizes[1]; ++k) {
                const Element value = data[(three ? i * masks.strides[0] : 0) + r * strides[0] + k * strides[1]];
                if (value != one && value != Element{0} && value != negative_zero) return false;
                *bytes++ = value == one;
            }
    return true;
}

}  // namespace

const char* name(Scalar dtype) {
    switch (dtype) {
        case Scalar::uint8: return "uint8";
        case Scalar::int8: return "int8";
        case Scalar::int16: return "int16";
        case Scalar::int32: return "int32";
        case Scalar::int64: return "int64";
        case Scalar::float16: return "float16";
        case Scalar::float32: return "float32";
        case Scalar::float64: return "float64";
        case Scalar::boolean: return "bool";
        case Scalar::bfloat16: return "bfloat16";
    }
    return "another";
}

std::int64_t Tensor::elements() const {
    std::int64_t count = 1;
    for (std::int64_t i = 0; i < dims; ++i) count *= sizes[i];
    return count;
}

bool Tensor::is_contiguous() const {
    std::int64_t expected = 1;
    for (std::int64_t i = dims - 1; i >= 0; --i) {
        if (sizes[i] == 0) return true;
        if (sizes[i] != 1 && strides[i] != expected) return false;
        expected *= sizes[i];
    }
    return true;
}

std::string Tensor::shape() const {
    std::string words = "[";
    for (std::int64_t i = 0; i < dims; ++i) words += (i == 0 ? "" : ", ") + text(sizes[i]);
    return words + "]";
}

void check_packed(const Tensor& packed_masks, std::int64_t in_features) {
    if (packed_masks.dtype != Scalar::uint8)
        refuse(std::string("packed_masks: got dtype ") + name(packed_masks.dtype) +
               ", must be uint8; pack masks with mglu::pack_masks");
    if (in_features < 0) refuse("in_features: got " + text(in_features) + ", must be at least 0");
    if (packed_masks.dims != 3 || packed_masks.sizes[1] != packed_width(in_features))
        refuse("packed_masks: got shape " + packed_masks.shape() + ", must be [out_features, " +
               text(packed_width(in_features)) + ", n_masks] for in_features=" + text(in_features));
    if (packed_masks.sizes[2] < 1 || packed_masks.sizes[2] > kMaxMasks)
        refuse("packed_masks: got n_masks=" + text(packed_masks.sizes[2]) + ", must be 1 to 16");
}

void check(const Layer& layer) {
    const Tensor& x = layer.x;
    const Tensor& weight = layer.weight;
    const Tensor& masks = layer.packed_masks;
    if (!is_floating(x.dtype)) refuse(std::string("x: got dtype ") + name(x.dtype) + ", must be floating");
    if (weight.dtype != x.dtype)
        refuse(std::string("weight: got dtype ") + name(weight.dtype) + ", must be x's dtype " + name(x.dtype));
    if (x.dims < 1 || x.dims > Tensor::kMaxDims) refuse("x: got " + text(x.dims) + " dimensions, must be 1 or more");
    if (weight.dims != 2) refuse("weight: got shape " + weight.shape() + ", must be [out_features, in_features]");
    if (x.last_size() != weight.sizes[1])
        refuse("x: got shape " + x.shape() + ", its last size must be weight's in_features " + text(weight.sizes[1]));
    check_packed(masks, weight.sizes[1]);
    if (masks.sizes[0] != weight.sizes[0])
        refuse("packed_masks: got shape " + masks.shape() + ", must have weight's out_features " + text(weight.sizes[0]));
    check_same_device("weight", weight, x);
    check_same_device("packed_masks", masks, x);
    activation_number(layer.activation);
    if (const Tensor* route = layer.route_weights) {
        if (!is_floating(route->dtype))
            refuse(std::string("route_weights: got dtype ") + name(route->dtype) + ", must be floating");
        const bool same_tokens = route->dims == x.dims && std::equal(x.sizes, x.sizes + x.dims - 1, route->sizes);
        if (!same_tokens || route->last_size() != masks.sizes[2])
            refuse("route_weights: got shape " + route->shape() + ", must be x's leading sizes and n_masks");
        check_same_device("route_weights", *route, x);
    }
}

// The CPU kernels want dense rows, the GPU's copy engine rows of whole vectors.
bool needs_copy_of_x(const Layer& layer) {
    const bool on_gpu = layer.x.device == Device::cuda;
    return !folds(layer.x, on_gpu) || (on_gpu && !in_vectors(layer.x));
}

bool needs_copy_of_weight(const Layer& layer) {
    return layer.x.device == Device::cpu && layer.weight.sizes[1] > 1 && layer.weight.strides[1] != 1;
}

bool needs_copy_of_masks(const Layer& layer) {
    const Tensor& masks = layer.packed_masks;
    const bool dense = (masks.sizes[2] == 1 || masks.strides[2] == 1) &&
                       (masks.sizes[1] <= 1 || masks.strides[1] == masks.sizes[2]);
    return layer.x.device == Device::cpu && !dense;
}

bool needs_copy_of_route_weights(const Layer& layer) { return layer.route_weights && !folds(*layer.route_weights, true); }

std::vector<std::int64_t> result_of(const Layer& layer) {
    std::vector<std::int64_t> sizes(layer.x.sizes, layer.x.sizes + layer.x.dims);
    sizes.back() = layer.weight.sizes[0];
    return sizes;
}

void forward(const Layer& layer, const Tensor& out, const Executor& executor) {
    if (out.elements() == 0) return;
    switch (layer.x.device) {
        case Device::cpu: return forward_cpu(layer, out, executor);
        case Device::cuda: {
            cuda::Call call{};
            call.layer = &layer;
            call.tokens = tokens_of(layer.x);
            call.x_row_stride = row_stride(layer.x);
            call.route_row_stride = layer.route_weights ? row_stride(*layer.route_weights) : 0;
            call.activation = activation_number(layer.activation);
            call.out = out.data;
            call.executor = &executor;
            return cuda::forward(call);
        }
    }
    refuse("x: got device type " + text(static_cast<int>(layer.x.device)) + ", must be a CPU or a CUDA GPU");
}

void check_masks(const Tensor& masks) {
    if (masks.dims != 2 && masks.dims != 3)
        refuse("masks: got shape " + masks.shape() + ", must be [n_masks, out_features, in_features] or [out_features, "
               "in_features]");
    if (masks.dims == 3 && (masks.sizes[0] < 1 || masks.sizes[0] > kMaxMasks))
        refuse("masks: got n_masks=" + text(masks.sizes[0]) + ", must be 1 to 16");
    if (masks.device != Device::cpu)
        refuse("masks: got device " + device_name(masks) + "; this library packs on the CPU");
}

std::vector<std::int64_t> packed_sizes(const Tensor& masks) {
    const std::int64_t* sizes = masks.sizes + (masks.dims == 3 ? 1 : 0);
    return {sizes[0], packed_width(sizes[1]), masks.dims == 3 ? masks.sizes[0] : 1};
}

void pack_masks(const Tensor& masks, const Tensor& out, const Executor& executor) {
    if (out.elements() == 0) return;
    const bool three = masks.dims == 3;
    cpu::Pack call{};
    call.packed_masks = static_cast<std::uint8_t*>(out.data);
    call.n_masks = three ? masks.sizes[0] : 1;
    call.out_features = out.sizes[0];
    call.in_features = masks.last_size();
    std::vector<std::uint8_t> bytes;
    if (masks.dtype == Scalar::boolean) {
        call.masks = static_cast<const std::uint8_t*>(masks.data);
        call.mask_stride = three ? masks.strides[0] : 0;
        call.row_stride = masks.strides[masks.dims - 2];
        call.column_stride = masks.strides[masks.dims - 1];
    } else {
        bytes.resize(static_cast<std::size_t>(masks.elements()));
        bool binary = false;
        switch (masks.dtype) {
            case Scalar::uint8: binary = to_bytes<std::uint8_t>(masks, bytes.data(), 1); break;
            case Scalar::int8: binary = to_bytes<std::int8_t>(masks, bytes.data(), 1); break;
            case Scalar::int16: binary = to_bytes<std::int16_t>(masks, bytes.data(), 1); break;
            case Scalar::int32: binary = to_bytes<std::int32_t>(masks, bytes.data(), 1); break;
            case Scalar::int64: binary = to_bytes<std::int64_t>(masks, bytes.data(), 1); break;
            case Scalar::float16: binary = to_bytes<std::uint16_t>(masks, bytes.data(), 0x3C00, 0x8000); break;
            case Scalar::bfloat16: binary = to_bytes<std::uint16_t>(masks, bytes.data(), 0x3F80, 0x8000); break;
            case Scalar::float32: binary = to_bytes<float>(masks, bytes.data(), 1); break;
            case Scalar::float64: binary = to_bytes<double>(masks, bytes.data(), 1); break;
            default: refuse("masks: must be bool, or integer or real with values 0 and 1");
        }
        if (!binary) refuse("masks: a value is neither 0 nor 1; for real-valued logits, pack `logits > 0`");
        call.masks = bytes.data();
        call.mask_stride = call.out_features * call.in_features;
        call.row_stride = call.in_features;
        call.column_stride = 1;
    }
    raise_unless_ok(cpu::pack_masks(call, executor.parallel_for));
}

void unpack_masks(const Tensor& packed_masks, std::int64_t in_features, const Tensor& out, const Executor& executor) {
    if (packed_masks.device != Device::cpu)
        refuse("packed_masks: got device " + device_name(packed_masks) + "; this library unpacks on the CPU");
    if (out.elements() == 0) return;
    cpu::Unpack call{};
    call.packed_masks = static_cast<const std::uint8_t*>(packed_masks.data);
    call.masks = static_cast<std::uint8_t*>(out.data);
    call.n_masks = packed_masks.sizes[2];
    call.out_features = packed_masks.sizes[0];
    call.in_features = in_features;
    call.row_stride = packed_masks.strides[0];
    call.octet_stride = packed_masks.strides[1];
    call.mask_stride = packed_masks.strides[2];
    raise_unless_ok(cpu::unpack_masks(call, executor.parallel_for));
}

}  // namespace mglu
