// A tensor without torch: an address, sizes and strides. Code that takes it can be tested without torch.
#pragma once

#include <cstdint>
#include <string>

namespace mglu {

// The numbers are torch's (c10::ScalarType), which torch's C interface uses too.
enum class Scalar : std::int32_t {
    uint8 = 0,
    int8 = 1,
    int16 = 2,
    int32 = 3,
    int64 = 4,
    float16 = 5,
    float32 = 6,
    float64 = 7,
    boolean = 11,
    bfloat16 = 15,
    float8_e4m3fn = 24,
};

// The numbers are torch's (c10::DeviceType).
enum class Device : std::int32_t { cpu = 0, cuda = 1 };

const char* name(Scalar dtype);
bool is_floating(Scalar dtype);
std::int64_t item_bytes(Scalar dtype);  // bytes of an element; 1 for an unknown dtype

// A Tensor does not own its data, sizes and strides.
struct Tensor {
    void* data = nullptr;
    std::int64_t dims = 0;
    const std::int64_t* sizes = nullptr;
    const std::int64_t* strides = nullptr;  // in elements
    Scalar dtype = Scalar::float32;
    Device device = Device::cpu;
    std::int32_t device_index = -1;

    std::int64_t last_size() const { return sizes[dims - 1]; }
    std::int64_t last_stride() const { return strides[dims - 1]; }
    std::int64_t elements() const;
    bool is_contiguous() const;
    bool is_aligned() const;          // to 16 bytes, the widest load of the kernels
    std::string shape() const;        // "[2, 3]"
    std::string device_name() const;  // "cpu", "cuda:0"
};

// Throws std::invalid_argument. Messages have the form of mglu_ops/checks.py: the argument, its value, and what the
// value must be.
[[noreturn]] void refuse(const std::string& message);
[[noreturn]] void refuse_dtype(const char* argument, Scalar dtype, const std::string& must_be);

}  // namespace mglu
