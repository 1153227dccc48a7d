// The CUDA driver and NVRTC, opened where there is one: nothing of CUDA is needed to build or load this library.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace mglu::cuda {

struct DeviceFacts {
    int device;  // the driver's number, of the current context
    int arch;    // 90 for compute capability 9.0
};

// Of the current context.
DeviceFacts current_device();

// A kernel in the current context.
using Function = void*;
Function load(const void* cubin, const char* name, unsigned shared_bytes);

struct Geometry {
    unsigned grid_x, grid_y, threads, shared_bytes;
    bool overlap;  // may be set up while the kernel before it in the stream still runs
};

// A matrix in rows, as the copy engine takes boxes of it (mglu_ops/backends/cuda/tensor_map.py). Sizes but `pitch` (bytes
// from a row to the next) are in elements.
struct Matrix {
    int item;  // bytes of an element, 1 or 2
    std::uint64_t width, height, pitch;
    std::uint32_t box_width, box_height;
    bool swizzle;
};

// What the driver encodes of it, as kernels take it.
struct alignas(64) TensorMap {
    unsigned char bytes[128];
};
TensorMap encode(const Matrix& matrix, const void* pointer);

// `parameters` are the one argument of every kernel.
void launch(Function function, const Geometry& geometry, void* stream, void* parameters);

struct Source {
    const char* name;
    const char* text;
};

// The cubin of `sources[0]`, which may include the others.
std::vector<char> compile(const std::vector<Source>& sources, int arch, const std::vector<std::string>& options);

}  // namespace mglu::cuda
