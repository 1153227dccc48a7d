// What is compiled into the library: cubins, and which of them runs a problem.
#pragma once

#include <cstddef>
#include <cstdint>

#include "driver.h"

namespace mglu::cuda {

struct Cubin {
    const char* name;  // of its kernel
    const unsigned char* code;
};

// What a kernel is compiled for. Numbers of types are those of csrc/cuda/element.cuh; route is -1 for none.
struct Variant {
    int arch;
    int element;
    int n_masks;
    int activation;
    int route;

    bool operator==(const Variant& other) const {
        return arch == other.arch && element == other.element && n_masks == other.n_masks &&
               activation == other.activation && route == other.route;
    }
};

// What makes the copy of x that tile_wgmma reads where x is turned, on the same stream before it.
struct Turn {
    int cubin;  // -1 for a kernel that reads x as it is
    unsigned blocks;
    std::int64_t bytes;  // of the copy
};

// How tile_wgmma copies x, W and the masks.
struct Boxes {
    std::uint32_t tokens;      // of a box of x, where there are as many; unused where x is turned
    std::uint32_t rows;        // of W and the masks; 0 for a kernel that copies by itself
    std::uint32_t mask_bytes;  // of a row; 0 where the masks' rows are no multiples of 16 bytes
    bool swizzle_masks;
};

// The tuned launch of a layer for some numbers of tokens: made by mglu_ops/packaging/device_code.py from the one place
// that holds such choices, mglu_ops/backends/cuda/choice.py.
struct TunedLaunch {
    Variant variant;
    std::int64_t out_features, in_features;
    std::int64_t first_tokens, last_tokens;
    int cubin;
    Geometry geometry;
    Turn turn;
    Boxes boxes;
};

// The kernel that takes any layout, for one token a pass or four.
struct PlainKernel {
    Variant variant;
    int tokens;
    int cubin;
};

struct Kernels {
    const Cubin* cubins;
    const TunedLaunch* tuned;
    std::size_t n_tuned;
    const PlainKernel* plain;
    std::size_t n_plain;
};

Kernels kernels();

// The sources of the plain kernel, its own first.
std::vector<Source> plain_sources();

}  // namespace mglu::cuda
