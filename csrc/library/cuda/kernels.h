// The kernels that are compiled into the library or, by NVRTC, at run time, and the tables that choose the kernel of a
// call.
#pragma once

#include <compare>
#include <cstdint>

#include "driver.h"

namespace mglu::cuda {

struct Cubin {
    const char* kernel;  // the function's name
    const unsigned char* code;
};

// The properties of a call for which a kernel is compiled. Element types are numbered as in csrc/cuda/element.cuh.
struct Variant {
    int arch;           // 90 for compute capability 9.0
    int element;        // element type of x
    int weight_format;  // code in csrc/cuda/weight_formats.cuh
    bool rounds_x;      // x is rounded to fp8_token, in the kernel or before it
    int n_masks;
    int activation;   // code in csrc/cpu/activation.h
    int mask_weight;  // element type of mask_weights; -1 without them

    auto operator<=>(const Variant& other) const = default;
};

// A launch that writes a copy for tile_wgmma: decode_weight copies W in x's type, and permute_x copies x with its
// columns in the order in which masks are read.
struct CopyLaunch {
    int cubin = -1;  // -1 if tile_wgmma reads the tensor itself
    unsigned blocks;
    std::int64_t bytes;  // size of the copy
};

// The first launch of a call that rounds x: quantize_x writes the rounded x, which the other kernels read.
struct QuantizeLaunch {
    int cubin = -1;        // -1 if the call does not round x, or if the gather kernel rounds x
    int block_tokens = 0;  // tile_wgmma's tokens per tile, if it multiplies in fp8; 0 if the copy has x's type
};

// The boxes in which tile_wgmma's producer warps copy x, W and the masks by TMA.
struct Boxes {
    std::uint32_t tokens;          // tokens of a box of x; unused if x is permuted or in fp8
    std::uint32_t rows;            // rows of a box of W and of the masks; 0 for a kernel that does not use TMA
    int weight_item_bytes;         // bytes of an element of W as the kernel reads it
    std::uint32_t weight_columns;  // elements in a row of a box of W: they hold 64 weights, or 128 in fp8
    std::uint32_t mask_bytes;      // bytes of a row of masks; 0 if they are no multiple of 16, as TMA needs
    bool swizzle_masks;
};

// How a kernel of experts divides rows into items, each up to `rows` rows of one expert (csrc/cuda/work.cuh), and the
// cubins that are launched before and after that kernel. A cubin of -1 is not needed.
struct ItemLaunch {
    int experts = 0;        // 0 for a layer without experts
    int top_k = 0;          // experts of a token; 0 if the rows are sorted by expert
    int rows = 0;           // maximum rows of an item
    int group_tokens = -1;  // writes the table of items first; not needed if blocks find their items
    int gather = -1;        // then copies x in the order of experts; not needed if the kernel reads x itself
    int columns = 0;        // columns of a row of that copy
    int combine = -1;    // sums the products of each token for mglu::experts_down; not needed if the kernel sums them
    int pair_bytes = 0;  // bytes of the products of one (token, expert) pair
};

// The launch of a layer for a range of token counts, or of mglu::experts_down, which has no masks. Tokens are the rows
// of x, or for mglu::experts_down the rows of the result. mglu_ops/packaging/device_code.py writes this table from the
// launches that Python's CUDA backend chooses for an architecture. launch.cpp adapts them to the GPU's number of SMs
// and shared memory.
struct TunedLaunch {
    Variant variant;
    std::int64_t out_features;
    std::int64_t in_features;
    std::int64_t first_tokens;
    std::int64_t last_tokens;
    int cubin;
    unsigned blocks;         // grid size, or blocks of one item; a multiple of `cluster`
    unsigned cluster;        // blocks of a thread block cluster
    bool persistent;         // blocks loop over the work, so a grid needs no more blocks than fit on the SMs
    unsigned threads;        // threads of a block
    unsigned shared_bytes;   // dynamic shared memory of a block; experts_down needs more for the sorted rows
    unsigned blocks_per_sm;  // limits the blocks on an SM, so that no SM idles while another has more; 0 for no limit
    bool overlap;            // programmatic dependent launch, as in Geometry
    QuantizeLaunch quantize_x{};
    CopyLaunch decode_weight{};
    CopyLaunch permute_x{};
    Boxes boxes{};
    ItemLaunch items{};
};

// A kernel that takes any layout, and `tokens` (1 or 4) tokens per block.
struct PlainKernel {
    Variant variant;
    int tokens;
    int cubin;
    int quantize_x;  // the cubin that writes the rounded x; -1 if the call does not round x
};

// The key of a layer, or of a call of mglu::experts_down, in the table of launches.
struct Layer {
    Variant variant;
    std::int64_t out_features;
    std::int64_t in_features;
    std::int64_t experts;  // experts and top_k are those of ItemLaunch
    std::int64_t top_k;
};

// The launch of a layer, or null if the table has none for this GPU.
const TunedLaunch* find_tuned(const Layer& layer, const DeviceFacts& device, std::int64_t tokens);
// The largest number of tokens for which the table has a launch of a layer; 0 for none.
std::int64_t most_tokens(const Layer& layer, const DeviceFacts& device);
const PlainKernel* find_plain(const Variant& variant, int tokens);

// Returns a kernel, which the first call loads into the current context. Kernels are never unloaded.
Function load_cubin(const DeviceFacts& device, int index, unsigned shared_bytes);

// These functions return kernels that NVRTC compiles at the first call. `items` is a value of Items
// (csrc/cuda/work.cuh).
Function compile_plain(const DeviceFacts& device, const Variant& variant, int tokens, int items = 0);
Function compile_quantize_x(const DeviceFacts& device, int arch, int element);
Function compile_group_tokens(const DeviceFacts& device, bool is_sorted, unsigned shared_bytes);

}  // namespace mglu::cuda
