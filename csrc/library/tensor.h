// A tensor as the library sees it: where it lies and how. Of no library, so that what reads it can be tested alone.
#pragma once

#include <cstdint>
#include <string>

namespace mglu {

// torch's own numbers (c10::ScalarType), which its C interface uses too.
enum class Scalar : std::int32_t {
    uint8 = 0, int8 = 1, int16 = 2, int32 = 3, int64 = 4, float16 = 5, float32 = 6, float64 = 7, boolean = 11,
    bfloat16 = 15,
};

// Of torch (c10::DeviceType).
enum class Device : std::int32_t { cpu = 0, cuda = 1 };

const char* name(Scalar dtype);

struct Tensor {
    static constexpr int kMaxDims = 64;  // as torch

    void* data = nullptr;
    std::int64_t dims = 0;
    const std::int64_t* sizes = nullptr;
    const std::int64_t* strides = nullptr;  // in elements
    Scalar dtype = Scalar::float32;
    Device device = Device::cpu;
    std::int32_t device_index = -1;

    std::int64_t last_size() const { return sizes[dims - 1]; }
    std::int64_t elements() const;
    bool is_contiguous() const;
    std::string shape() const;  // "[2, 3]"
};

}  // namespace mglu
