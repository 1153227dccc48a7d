#include "launch.h"

#include <algorithm>
#include <cstdio>
#include <mutex>
#include <stdexcept>
#include <string>
#include <tuple>

#include "../../cuda/params.cuh"
#include "kernels.h"

namespace mglu::cuda {

namespace {

constexpr std::int64_t kMaxTokens = 512;  // tokens of a launch; a larger call makes several (device_code.MAX_TOKENS)
constexpr unsigned kPlainThreads = 256, kPlainWarps = 8, kCopyThreads = 256, kGroupThreads = 512, kCombineThreads = 128;

unsigned ceil_div(std::int64_t a, std::int64_t b) { return static_cast<unsigned>((a + b - 1) / b); }
std::int64_t round_up(std::int64_t size, std::int64_t multiple) { return (size + multiple - 1) / multiple * multiple; }

// The code of an element type in csrc/cuda/element.cuh.
int element(const char* argument, Scalar dtype) {
    switch (dtype) {
        case Scalar::float16: return 0;
        case Scalar::bfloat16: return 1;
        case Scalar::float32: return 2;
        default:
            refuse(std::string(argument) + ": got dtype " + name(dtype) +
                   ", the GPU kernels have float16, bfloat16 and float32");
    }
}

// True if the weight and the masks are contiguous and aligned to 16 bytes, as the tuned kernels require.
bool has_tuned_layout(const LayerCall& call) {
    return call.weight.is_contiguous() && call.packed_masks.is_contiguous() && call.weight.is_aligned() &&
           call.packed_masks.is_aligned();
}

Variant variant_of(const LayerCall& call, const DeviceFacts& device) {
    const auto& mask_weight = call.mask_weights;
    return {.arch = device.arch,
            .element = element("x", call.x.dtype),
            .weight_format = static_cast<int>(call.weight_format),
            .rounds_x = call.rounds_x,
            .n_masks = static_cast<int>(call.n_masks),
            .activation = call.activation,
            .mask_weight = mask_weight ? element("mask_weights", mask_weight->dtype) : -1};
}

void set_x(Params& p, const void* x, std::int64_t row_stride, std::int64_t column_stride, std::int64_t item) {
    p.x = x;
    p.x_row_stride = row_stride;
    p.x_column_stride = column_stride;
    p.x_is_vectorizable = column_stride == 1 && reinterpret_cast<std::uintptr_t>(x) % 16 == 0 &&
                          (p.tokens == 1 || row_stride * item % 16 == 0);
}

// The kernel parameters for `tokens` tokens, from token `first` on.
Params parameters(const LayerCall& call, void* out, std::int64_t first, std::int64_t tokens) {
    const std::int64_t item = item_bytes(call.x.dtype);
    Params p{};
    p.weight = call.weight.data;
    p.packed_masks = static_cast<const u8*>(call.packed_masks.data);
    if (call.weight_scale) p.weight_scale = call.weight_scale->data;
    p.out = static_cast<char*>(out) + first * call.out_features * item;
    p.weight_row_stride = call.weight.strides[0];
    p.weight_column_stride = call.weight.strides[1];
    p.mask_row_stride = call.packed_masks.strides[0];
    p.mask_octet_stride = call.packed_masks.strides[1];
    p.mask_stride = call.packed_masks.strides[2];
    if (const auto& mask_weight = call.mask_weights) {
        p.mask_weights = static_cast<const char*>(mask_weight->data) +
                         first * call.mask_weight_row_stride * item_bytes(mask_weight->dtype);
        p.mask_weight_row_stride = call.mask_weight_row_stride;
        p.mask_weight_column_stride = mask_weight->last_stride();
    }
    p.tokens = static_cast<std::int32_t>(tokens);
    p.out_features = static_cast<std::int32_t>(call.out_features);
    p.in_features = static_cast<std::int32_t>(call.in_features);
    set_x(p, static_cast<const char*>(call.x.data) + first * call.x_row_stride * item, call.x_row_stride,
          call.x.last_stride(), item);
    return p;
}

unsigned grid_blocks(const TunedLaunch& tuned, const DeviceFacts& device, std::int64_t items = 1) {
    const std::int64_t blocks = items * tuned.blocks;
    if (!tuned.persistent) {
        if (blocks > INT32_MAX)
            refuse("x: got rows for " + std::to_string(blocks) + " blocks, must be fewer than 2147483648");
        return static_cast<unsigned>(blocks);
    }
    const std::int64_t resident = device.sms * std::max(tuned.blocks_per_sm, 1u), cluster = tuned.cluster;
    return static_cast<unsigned>(std::min(blocks, std::max(resident / cluster, std::int64_t{1}) * cluster));
}

// The shared memory that a block requests: more than 1 / (blocks_per_sm + 1) of an SM's shared memory, so that at most
// blocks_per_sm blocks fit on an SM.
unsigned reserved_shared_bytes(const TunedLaunch& tuned, const DeviceFacts& device) {
    if (tuned.blocks_per_sm == 0) return tuned.shared_bytes;
    const int share = device.shared_bytes_per_sm / static_cast<int>(tuned.blocks_per_sm + 1);
    return std::max(tuned.shared_bytes, static_cast<unsigned>(share - device.reserved_shared_bytes_per_block + 128));
}

// The tokens and the bytes of a rounded x. If `block_tokens` is not 0, the rounded x is in fp8 and padded to whole
// tiles of that many tokens. Otherwise it has the type of x.
std::int64_t rounded_tokens(const Params& p, int block_tokens) {
    return block_tokens > 0 ? round_up(p.tokens, block_tokens) : p.tokens;
}
std::int64_t rounded_bytes(const Params& p, int block_tokens, std::int64_t item) {
    return rounded_tokens(p, block_tokens) *
           (block_tokens > 0 ? round_up(p.in_features, 128) + 4 : p.in_features * item);
}

// Launches quantize_x, which writes the rounded x to `out`, and makes `p` read x from there.
void round_x(Params& p, void* out, int block_tokens, Function kernel, bool overlap, std::int64_t item, void* stream) {
    Params rounding = p;
    rounding.out = out;
    const auto blocks = static_cast<unsigned>(rounded_tokens(p, block_tokens));
    launch(kernel, {blocks, 1, kCopyThreads, 0, overlap}, stream, &rounding);
    set_x(p, out, p.in_features, 1, item);
}

// Launches decode_weight or permute_x, which writes a copy of a tensor to `out`, and sets `pointer` to the copy.
void copy(const void*& pointer, void* out, const CopyLaunch& by, bool overlap, const DeviceFacts& device, Params p,
          void* stream) {
    p.out = out;
    launch(load_cubin(device, by.cubin, 0), {by.blocks, 1, kCopyThreads, 0, overlap}, stream, &p);
    pointer = out;
}

TileParams tile_parameters(const TunedLaunch& tuned, const Params& p) {
    const Boxes& box = tuned.boxes;
    const auto rows = static_cast<std::uint64_t>(p.out_features), width = static_cast<std::uint64_t>(p.in_features);
    const std::uint64_t height = rows * std::max(tuned.items.experts, 1);
    TileParams tile{};
    static_cast<Params&>(tile) = p;
    const bool in_fp8 = tuned.quantize_x.block_tokens > 0;
    const std::uint64_t stored = width * box.weight_columns / (in_fp8 ? 128 : 64);
    tile.weight_map = encode(
        {box.weight_item_bytes, stored, height, box.weight_item_bytes * stored, box.weight_columns, box.rows, true},
        p.weight);
    const bool is_gathered = tuned.items.gather >= 0;
    if (is_gathered || (tuned.permute_x.cubin < 0 && !in_fp8)) {
        const int bytes = in_fp8 ? 1 : 2;
        const auto tokens = static_cast<std::uint32_t>(p.tokens);
        const auto pitch = static_cast<std::uint64_t>(bytes * p.x_row_stride);
        const std::uint64_t columns = is_gathered ? static_cast<std::uint64_t>(tuned.items.columns) : width;
        tile.x_map = encode({bytes, columns, tokens, pitch, 128u / bytes, std::min(box.tokens, tokens), true}, p.x);
    }
    if (box.mask_bytes > 0) {
        const auto pitch = static_cast<std::uint64_t>(p.mask_row_stride);
        tile.masks_map = encode({1, pitch, height, pitch, box.mask_bytes, box.rows, box.swizzle_masks}, p.packed_masks);
    }
    return tile;
}

void launch_tuned(const TunedLaunch& tuned, const DeviceFacts& device, Params p, std::int64_t item,
                  const Executor& executor) {
    const auto& [quantize, decode, permute] = std::tie(tuned.quantize_x, tuned.decode_weight, tuned.permute_x);
    // Make one allocation for all copies, since a second one may free the first.
    const std::int64_t rounded = quantize.cubin < 0 ? 0 : round_up(rounded_bytes(p, quantize.block_tokens, item), 16);
    const std::int64_t decoded = round_up(decode.bytes, 16), bytes = rounded + decoded + permute.bytes;
    char* const memory = bytes > 0 ? static_cast<char*>(executor.allocate(bytes)) : nullptr;
    if (quantize.cubin >= 0)
        round_x(p, memory, quantize.block_tokens, load_cubin(device, quantize.cubin, 0), tuned.overlap, item,
                executor.stream);
    if (decode.cubin >= 0) copy(p.weight, memory + rounded, decode, tuned.overlap, device, p, executor.stream);
    if (permute.cubin >= 0) copy(p.x, memory + rounded + decoded, permute, tuned.overlap, device, p, executor.stream);
    const Geometry geometry{grid_blocks(tuned, device), 1, tuned.threads, reserved_shared_bytes(tuned, device),
                            tuned.overlap};
    const Function kernel = load_cubin(device, tuned.cubin, geometry.shared_bytes);
    if (tuned.boxes.rows == 0) return launch(kernel, geometry, executor.stream, &p);
    TileParams tile = tile_parameters(tuned, p);
    launch(kernel, geometry, executor.stream, &tile);
}

// Warns, once per process, that a call runs on the slow plain kernel.
void say_that_the_kernel_is_slow(const LayerCall& call) {
    static std::once_flag said;
    std::call_once(said, [&] {
        std::fprintf(
            stderr,
            "mglu: this libmglu_ops.so has no tuned kernel for a layer with weight %s, and uses the plain one, "
            "several times slower; build it with --arch and --package for this GPU and this model\n",
            call.weight.shape().c_str());
    });
}

void launch_plain(const Variant& variant, const DeviceFacts& device, Params p, std::int64_t item,
                  const Executor& executor) {
    const int tokens = p.tokens == 1 ? 1 : 4;
    const Geometry geometry{ceil_div(p.out_features, kPlainWarps), ceil_div(p.tokens, tokens), kPlainThreads, 0, false};
    const PlainKernel* found = find_plain(variant, tokens);
    if (variant.rounds_x) {
        const Function kernel = found != nullptr ? load_cubin(device, found->quantize_x, 0)
                                                 : compile_quantize_x(device, variant.arch, variant.element);
        round_x(p, executor.allocate(rounded_bytes(p, 0, item)), 0, kernel, device.arch >= 90, item, executor.stream);
    }
    launch(found != nullptr ? load_cubin(device, found->cubin, 0) : compile_plain(device, variant, tokens), geometry,
           executor.stream, &p);
}

// Returns the current device, or throws if it is too old or the weight too large for 32-bit indices.
const DeviceFacts& device_for(const Tensor& weight, std::int64_t out_features, std::int64_t in_features) {
    if (out_features >= INT32_MAX || in_features >= 1 << 28)
        refuse("weight: got shape " + weight.shape() + ", beyond the kernels' 32-bit indices");
    const DeviceFacts& device = current_device();
    if (device.arch < 80) throw std::runtime_error("mglu: the GPU kernels need compute capability 8.0");
    return device;
}

// --- Experts ---------------------------------------------------------------------------------------------------------

// The limits of group_tokens, and the largest number of rows with which blocks find their items themselves
// (group_tokens.py and experts.py in mglu_ops/backends/cuda/kernels).
constexpr std::int64_t kMostExperts = 1024, kMostRows = 1 << 20, kMostRowsToFind = 64;
constexpr std::int64_t kEntryBytes = 16;

// The kernels of a call of experts; null for those that the call does not need.
struct ExpertKernels {
    Function quantize_x, group_tokens, gather, kernel;
};

bool has_tuned_layout(const ExpertsCall& call) {
    const LayerCall& layer = call.layer;
    const auto follow = [&](const Tensor& tensor, std::int64_t stride) { return stride == tensor.elements(); };
    return has_tuned_layout(layer) &&
           (call.experts == 1 ||
            (follow(layer.weight, call.weight_stride) && follow(layer.packed_masks, call.masks_stride) &&
             (!layer.weight_scale || follow(*layer.weight_scale, call.scale_stride))));
}

unsigned group_shared_bytes(const ExpertsCall& call) {
    const std::int64_t arrays = call.is_sorted ? 2 : 2 + kGroupThreads / 32;
    return static_cast<unsigned>(round_up(4 * (call.experts + 1) * arrays, 16));
}

ItemParams item_parameters(const ExpertsCall& call, const ItemLaunch& by) {
    const LayerCall& layer = call.layer;
    ItemParams items{};
    items.expert_ids = call.routing.data;
    items.weight_stride = call.weight_stride * item_bytes(layer.weight.dtype);
    items.mask_stride = call.masks_stride;
    items.scale_stride = layer.weight_scale ? call.scale_stride * item_bytes(layer.weight_scale->dtype) : 0;
    items.id_bytes = static_cast<int>(item_bytes(call.routing.dtype));
    items.experts = static_cast<int>(call.experts);
    items.rows = static_cast<int>(call.rows);
    items.top_k = static_cast<int>(call.top_k);
    items.is_sorted = call.is_sorted;
    items.max_items = static_cast<int>(std::min(call.rows, call.rows / by.rows + call.experts + 1));
    return items;
}

void launch_experts(const TunedLaunch& tuned, const ExpertKernels& kernels, const DeviceFacts& device,
                    const ExpertsCall& call, void* out, const Executor& executor) {
    const bool overlap = device.arch >= 90, in_fp8 = tuned.quantize_x.block_tokens > 0;
    const std::int64_t item = item_bytes(call.layer.x.dtype), rows = call.rows, columns = tuned.items.columns;
    Params p = parameters(call.layer, out, 0, call.layer.tokens);
    ItemParams items = item_parameters(call, tuned.items);
    // Make one allocation for all that the kernel reads, as in launch_tuned.
    const std::int64_t rounded = kernels.quantize_x == nullptr ? 0 : round_up(rounded_bytes(p, 0, item), 16);
    const std::int64_t sorted_rows = call.is_sorted ? 0 : 4 * rows;
    const std::int64_t table =
        kernels.group_tokens == nullptr ? 0 : round_up(kEntryBytes * items.max_items + sorted_rows, 16);
    const std::int64_t gathered =
        kernels.gather == nullptr ? 0 : round_up(rows * (in_fp8 ? columns + 4 : 2 * columns), 16);
    const std::int64_t bytes = rounded + table + gathered;
    char* const memory = bytes > 0 ? static_cast<char*>(executor.allocate(bytes)) : nullptr;
    if (rounded > 0) round_x(p, memory, 0, kernels.quantize_x, overlap, item, executor.stream);
    if (table > 0) {
        GroupParams group{};
        group.expert_ids = items.expert_ids;
        group.out = reinterpret_cast<int*>(memory + rounded);
        group.id_bytes = items.id_bytes;
        group.experts = items.experts;
        group.rows = items.rows;
        group.item_rows = tuned.items.rows;
        group.max_items = items.max_items;
        launch(kernels.group_tokens, {1, 1, kGroupThreads, group_shared_bytes(call), overlap}, executor.stream, &group);
        items.items = group.out;
    }
    if (gathered > 0) {
        Params gathering = p;
        gathering.out = memory + rounded + table;
        gathering.tokens = items.rows;
        const unsigned blocks = in_fp8 ? items.rows : ceil_div(round_up(rows, 8) * columns, 8 * 8 * 64);
        launch(kernels.gather, {blocks, 1, kCopyThreads, 0, overlap}, executor.stream, &gathering, &items);
        p.tokens = items.rows;
        set_x(p, gathering.out, columns, 1, item);
    }
    const std::int64_t count = table > 0 ? items.max_items : rows;
    const Geometry geometry{grid_blocks(tuned, device, count), 1, tuned.threads, reserved_shared_bytes(tuned, device),
                            tuned.overlap};
    const Function kernel =
        kernels.kernel != nullptr ? kernels.kernel : load_cubin(device, tuned.cubin, geometry.shared_bytes);
    if (tuned.boxes.rows == 0) return launch(kernel, geometry, executor.stream, &p, &items);
    TileParams tile = tile_parameters(tuned, p);
    launch(kernel, geometry, executor.stream, &tile, &items);
}

void launch_plain_experts(const Variant& variant, const DeviceFacts& device, const ExpertsCall& call, void* out,
                          const Executor& executor) {
    const bool is_grouped = call.is_sorted || call.rows > kMostRowsToFind;
    TunedLaunch plain{};
    plain.items.rows = call.layer.tokens == 1 ? 1 : 4;
    plain.blocks = ceil_div(call.layer.out_features, kPlainWarps);
    plain.cluster = 1;
    plain.threads = kPlainThreads;
    ExpertKernels kernels{};
    kernels.kernel = compile_plain(device, variant, plain.items.rows, is_grouped ? 1 : 2);
    if (call.layer.rounds_x) kernels.quantize_x = compile_quantize_x(device, variant.arch, variant.element);
    if (is_grouped) kernels.group_tokens = compile_group_tokens(device, call.is_sorted, group_shared_bytes(call));
    launch_experts(plain, kernels, device, call, out, executor);
}

// Launches the kernels for `tokens` tokens, from token `first` on.
void launch_down(const TunedLaunch& tuned, const DeviceFacts& device, const DownCall& call, std::int64_t first,
                 std::int64_t tokens, void* out, const Executor& executor) {
    const ItemLaunch& by = tuned.items;
    const std::int64_t pair = first * by.top_k, pairs = tokens * by.top_k;
    const std::int64_t out_features = tuned.out_features, item = item_bytes(call.y.dtype);
    const std::int64_t most_items = std::min(pairs, pairs / by.rows + by.experts);
    const auto at = [](const Tensor& tensor, std::int64_t i) {
        return static_cast<char*>(tensor.data) + i * item_bytes(tensor.dtype);
    };
    DownParams p{};
    p.y = at(call.y, pair * tuned.in_features);
    p.weight = call.weight.data;
    if (call.weight_scale) {
        p.weight_scale = call.weight_scale->data;
        p.scale_stride = call.weight_scale->elements() / by.experts;
    }
    p.expert_ids = at(call.expert_ids, pair);
    p.expert_weights = at(call.expert_weights, pair);
    void* const result = static_cast<char*>(out) + first * out_features * item;
    p.out = by.combine < 0 ? result : executor.allocate(by.pair_bytes * pairs);
    p.weight_stride = call.weight.strides[0];
    p.weight_row_stride = call.weight.strides[1];
    p.id_bytes = static_cast<int>(item_bytes(call.expert_ids.dtype));
    p.pairs = static_cast<int>(pairs);
    p.experts = by.experts;
    p.out_features = static_cast<int>(out_features);
    p.in_features = static_cast<int>(tuned.in_features);
    const unsigned shared_bytes = tuned.shared_bytes + static_cast<unsigned>(8 * most_items + 2 * pairs);
    const Function kernel = load_cubin(device, tuned.cubin, device.max_shared_bytes_per_block);
    const unsigned blocks = grid_blocks(tuned, device, tuned.persistent ? most_items : 1);
    launch(kernel, {blocks, 1, tuned.threads, shared_bytes, tuned.overlap}, executor.stream, &p);
    if (by.combine < 0) return;
    CombineParams sum{};
    sum.products = p.out;
    sum.expert_ids = p.expert_ids;
    sum.expert_weights = p.expert_weights;
    sum.out = result;
    sum.id_bytes = p.id_bytes;
    sum.experts = p.experts;
    sum.out_features = p.out_features;
    const std::int64_t columns = kCombineThreads * (out_features % 4 == 0 ? 4 : 1);
    launch(load_cubin(device, by.combine, 0),
           {static_cast<unsigned>(tokens), ceil_div(out_features, columns), kCombineThreads, 0, tuned.overlap},
           executor.stream, &sum);
}

}  // namespace

void forward(const LayerCall& call, void* out, const Executor& executor) {
    const DeviceFacts& device = device_for(call.weight, call.out_features, call.in_features);
    const Variant variant = variant_of(call, device);
    const std::int64_t item = item_bytes(call.x.dtype);
    const bool tuned_layout = has_tuned_layout(call);
    const Layer layer{variant, call.out_features, call.in_features, 0, 0};
    for (std::int64_t first = 0; first < call.tokens; first += kMaxTokens) {
        const std::int64_t tokens = std::min(kMaxTokens, call.tokens - first);
        const Params p = parameters(call, out, first, tokens);
        const TunedLaunch* tuned = tuned_layout ? find_tuned(layer, device, tokens) : nullptr;
        if (tuned != nullptr) {
            launch_tuned(*tuned, device, p, item, executor);
        } else {
            say_that_the_kernel_is_slow(call);
            launch_plain(variant, device, p, item, executor);
        }
    }
}

void forward(const ExpertsCall& call, void* out, const Executor& executor) {
    const LayerCall& shared = call.layer;
    const DeviceFacts& device = device_for(shared.weight, shared.out_features, shared.in_features);
    if (call.experts > kMostExperts || call.rows > kMostRows)
        refuse("weight: got " + std::to_string(call.experts) + " experts for " + std::to_string(call.rows) +
               " rows, must be at most " + std::to_string(kMostExperts) + " for at most " + std::to_string(kMostRows) +
               " rows on a GPU");
    const Variant variant = variant_of(shared, device);
    const Layer layer{variant, shared.out_features, shared.in_features, call.experts, call.is_sorted ? 0 : call.top_k};
    const TunedLaunch* tuned = has_tuned_layout(call) ? find_tuned(layer, device, shared.tokens) : nullptr;
    if (tuned == nullptr) {
        say_that_the_kernel_is_slow(shared);
        return launch_plain_experts(variant, device, call, out, executor);
    }
    const auto load_if = [&](int cubin, unsigned shared_bytes) {
        return cubin < 0 ? nullptr : load_cubin(device, cubin, shared_bytes);
    };
    const ExpertKernels kernels{load_if(tuned->quantize_x.cubin, 0),
                                load_if(tuned->items.group_tokens, group_shared_bytes(call)),
                                load_if(tuned->items.gather, 0), nullptr};
    launch_experts(*tuned, kernels, device, call, out, executor);
}

void experts_down(const DownCall& call, void* out, const Executor& executor) {
    const std::int64_t tokens = call.y.sizes[0], top_k = call.y.sizes[1], experts = call.weight.sizes[0];
    const std::int64_t out_features = call.weight.sizes[1], in_features = call.y.sizes[2];
    const DeviceFacts& device = device_for(call.weight, out_features, in_features);
    const Variant variant{.arch = device.arch,
                          .element = element("y", call.y.dtype),
                          .weight_format = static_cast<int>(call.weight_format),
                          .rounds_x = false,
                          .n_masks = 0,
                          .activation = static_cast<int>(cpu::Activation::identity),
                          .mask_weight = element("expert_weights", call.expert_weights.dtype)};
    const Layer layer{variant, out_features, in_features, experts, top_k};
    const std::int64_t most = most_tokens(layer, device);
    if (most == 0)
        refuse("weight: got shape " + call.weight.shape() + ", for which this library has no GPU kernel of " +
               "mglu::experts_down with " + std::to_string(top_k) + " experts a token in " + name(call.y.dtype) +
               "; build it with --arch and --package for this GPU and this model");
    for (std::int64_t first = 0; first < tokens; first += most) {
        const std::int64_t count = std::min(most, tokens - first);
        launch_down(*find_tuned(layer, device, count), device, call, first, count, out, executor);
    }
}

}  // namespace mglu::cuda
