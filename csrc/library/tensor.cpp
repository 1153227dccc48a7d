#include "tensor.h"

#include <stdexcept>

namespace mglu {

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
        case Scalar::float8_e4m3fn: return "float8_e4m3fn";
    }
    return "another";
}

bool is_floating(Scalar dtype) {
    return dtype == Scalar::float16 || dtype == Scalar::bfloat16 || dtype == Scalar::float32 ||
           dtype == Scalar::float64;
}

std::int64_t item_bytes(Scalar dtype) {
    switch (dtype) {
        case Scalar::int16:
        case Scalar::float16:
        case Scalar::bfloat16: return 2;
        case Scalar::int32:
        case Scalar::float32: return 4;
        case Scalar::int64:
        case Scalar::float64: return 8;
        default: return 1;
    }
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

bool Tensor::is_aligned() const { return reinterpret_cast<std::uintptr_t>(data) % 16 == 0; }

std::string Tensor::shape() const {
    std::string text = "[";
    for (std::int64_t i = 0; i < dims; ++i) text += (i == 0 ? "" : ", ") + std::to_string(sizes[i]);
    return text + "]";
}

std::string Tensor::device_name() const {
    if (device == Device::cpu) return "cpu";
    return (device == Device::cuda ? "cuda:" : "device:") + std::to_string(device_index);
}

void refuse(const std::string& message) { throw std::invalid_argument(message); }

void refuse_dtype(const char* argument, Scalar dtype, const std::string& must_be) {
    refuse(std::string(argument) + ": got dtype " + name(dtype) + ", " + must_be);
}

}  // namespace mglu
