// Calls the CUDA driver and NVRTC. Both are opened when they are first called, so that libmglu_ops.so can be built and
// loaded on machines without CUDA.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "../../cuda/types.cuh"

namespace mglu::cuda {

struct DeviceFacts {
    int device;  // the driver's number
    int arch;    // 90 for compute capability 9.0
    int sms;
    int shared_bytes_per_sm;
    int max_shared_bytes_per_block;  // the most dynamic shared memory of a block
};

// Returns the device of the current context, whose properties are read once per process.
const DeviceFacts& current_device();

// Loads a kernel into the current context.
using Function = void*;
Function load(const void* cubin, const char* kernel);
// Lets launches of a kernel request up to `shared_bytes` of dynamic shared memory.
void allow_shared(Function function, unsigned shared_bytes, const char* kernel);

struct Geometry {
    unsigned grid_x, grid_y, threads, shared_bytes;
    bool overlap;  // programmatic dependent launch: may start while the previous kernel of the stream still runs
};

// A row-major matrix and the box in which TMA copies it (mglu_ops/backends/cuda/tensor_map.py). Sizes count elements,
// except `pitch`.
struct Matrix {
    int item_bytes;  // bytes of an element, 1 or 2
    std::uint64_t width, height;
    std::uint64_t pitch;  // bytes from one row to the next
    std::uint32_t box_width, box_height;
    bool swizzle;  // permutes 16-byte vectors in shared memory, by the driver's mode for rows of 128, 64 or 32 bytes
};

TensorMap encode(const Matrix& matrix, const void* pointer);

// `parameters` points to the kernel's first struct. `items` points to the ItemParams of kernels for experts; else null.
void launch(Function function, const Geometry& geometry, void* stream, void* parameters, void* items = nullptr);

struct Source {
    const char* name;
    const char* text;
};

// Compiles `sources[0]`, which may include the others, to a cubin with NVRTC.
std::vector<char> compile(const std::vector<Source>& sources, int arch, const std::vector<std::string>& options);

}  // namespace mglu::cuda
