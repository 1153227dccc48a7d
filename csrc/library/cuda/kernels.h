// The kernels that are compiled into the library or where it runs, and the tables that say which kernel runs a call.
#pragma once

#include <compare>
#include <cstdint>

#include "driver.h"

namespace mglu::cuda {

struct Cubin {
    const char* kernel;  // the name of its function
    const unsigned char* code;
};

// What a kernel is compiled for. Element types have the numbers of csrc/cuda/element.cuh.
struct Variant {
    int arch;           // 90 for compute capability 9.0
    int element;        // of x
    int weight_format;  // its code in csrc/cuda/weight_formats.cuh
    bool rounds_x;      // to fp8_token, before or in the kernel
    int n_masks;
    int activation;   // its code in csrc/cpu/activation.h
    int mask_weight;  // element type of mask_weights; -1 without them

    auto operator<=>(const Variant& other) const = default;
};

// A launch on the same stream before tile_wgmma, which reads the copy: decode_weight copies W in x's type, and permute_x
// copies x with its columns in the order in which masks are read.
struct CopyLaunch {
    int cubin = -1;  // -1 for a kernel that reads the tensor itself
    unsigned blocks;
    std::int64_t bytes;  // of the copy
};

// A launch of quantize_x on the same stream before all others, which read the rounded x.
struct QuantizeLaunch {
    int cubin = -1;        // -1 for a call that does not round x, or does as it gathers x
    int block_tokens = 0;  // of a tile of tile_wgmma that multiplies in fp8; 0 for a copy in x's type
};

// The boxes in which tile_wgmma's producer warps copy x, W and the masks by TMA.
struct Boxes {
    std::uint32_t tokens;          // of x, at most the call's; unused where x is permuted or in fp8
    std::uint32_t rows;            // of W and the masks; 0 for a kernel that does not use TMA
    int weight_item_bytes;         // of an element of W as the kernel reads it
    std::uint32_t weight_columns;  // of such elements, which hold 64 weights, or 128 in fp8
    std::uint32_t mask_bytes;      // of a row; 0 where rows are not multiples of 16 bytes, which TMA cannot copy
    bool swizzle_masks;
};

// How a launch takes the rows of experts as items, each up to `rows` rows of one expert (csrc/cuda/work.cuh), and the
// cubins of the launches before and after it; -1 for those that it does without.
struct ItemLaunch {
    int experts = 0;        // none for a layer without experts
    int top_k = 0;          // experts of a token; 0 where the rows are sorted by expert
    int rows = 0;           // the most of an item
    int group_tokens = -1;  // writes the table of items first, unless blocks find their items
    int gather = -1;        // then writes x in the order of experts, with `columns`, unless the kernel reads x
    int columns = 0;
    int combine = -1;    // of mglu::experts_down: adds the products of a token, unless the kernel does
    int pair_bytes = 0;  // that the products of a pair of a token and an expert take
};

// The launch of a layer, or of mglu::experts_down, which has no masks, for a range of numbers of tokens. Tokens are the
// rows of x, or of the result of mglu::experts_down. mglu_ops/packaging/device_code.py writes these rows from the
// launches that Python's CUDA backend chooses for an architecture. launch.cpp adjusts them to the number of SMs and the
// shared memory of the GPU.
struct TunedLaunch {
    Variant variant;
    std::int64_t out_features;
    std::int64_t in_features;
    std::int64_t first_tokens;
    std::int64_t last_tokens;
    int cubin;
    unsigned blocks;         // for all of the work, or for one item; a multiple of `cluster`
    unsigned cluster;        // blocks of a thread block cluster
    bool persistent;         // its blocks loop over the work, so a grid needs no more blocks than fit on the SMs
    unsigned threads;        // of a block
    unsigned shared_bytes;   // of dynamic shared memory that a block needs, beside the order of experts_down's rows
    unsigned blocks_per_sm;  // 0, or the most blocks an SM may run, so that none idles while another has more
    bool overlap;            // may be set up while the kernel before it in the stream still runs
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
    int quantize_x;  // the cubin that rounds x to a copy in its type; -1 for a call that does not round it
};

// A layer as the table of launches has it, or a call of mglu::experts_down.
struct Layer {
    Variant variant;
    std::int64_t out_features;
    std::int64_t in_features;
    std::int64_t experts;  // as in ItemLaunch
    std::int64_t top_k;
};

// The launch of a layer, null if the table has none for this GPU; and the most tokens of its launches, 0 for none.
const TunedLaunch* find_tuned(const Layer& layer, const DeviceFacts& device, std::int64_t tokens);
std::int64_t most_tokens(const Layer& layer, const DeviceFacts& device);
const PlainKernel* find_plain(const Variant& variant, int tokens);

// Kernels in the current context, which are loaded at the first call. They are never unloaded.
Function load_cubin(const DeviceFacts& device, int index, unsigned shared_bytes);

// The same for kernels that NVRTC compiles at the first call. `items` is a number of Items in csrc/cuda/work.cuh, and
// `quantize_x` rounds x to a copy in its type.
Function compile_plain(const DeviceFacts& device, const Variant& variant, int tokens, int items = 0);
Function compile_quantize_x(const DeviceFacts& device, int arch, int element);
Function compile_group_tokens(const DeviceFacts& device, bool is_sorted, unsigned shared_bytes);

}  // namespace mglu::cuda
