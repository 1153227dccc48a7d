#include "launch.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <mutex>
#include <span>
#include <stdexcept>
#include <string>
#include <tuple>

#include "../../cuda/params.cuh"
#include "kernels.h"

namespace mglu::cuda {

namespace {

constexpr std::int64_t kMaxTokens = 512;  // of a launch; calls with more make several (MAX_TOKENS in device_code.py)
constexpr unsigned kPlainThreads = 256, kPlainWarps = 8, kCopyThreads = 256;

// The number of an element type in csrc/cuda/element.cuh.
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

// Whether the tuned kernels take the layout: contiguous, in aligned 16-byte vectors.
bool has_tuned_layout(const LayerCall& call) {
    return call.weight.is_contiguous() && call.packed_masks.is_contiguous() && call.weight.is_aligned() &&
           call.packed_masks.is_aligned();
}

// Whether a kernel that was compiled for `built` computes what `wanted` asks for, on the device of `wanted`. A cubin
// runs on its own architecture, and on later minor versions of the same major one.
bool serves(const Variant& built, Variant wanted) {
    if (built.arch / 10 == wanted.arch / 10 && built.arch <= wanted.arch) wanted.arch = built.arch;
    return built == wanted;
}

void set_x(Params& p, const void* x, std::int64_t row_stride, std::int64_t column_stride, std::int64_t item) {
    p.x = x;
    p.x_row_stride = row_stride;
    p.x_column_stride = column_stride;
    p.x_is_vectorizable = column_stride == 1 && reinterpret_cast<std::uintptr_t>(x) % 16 == 0 &&
                          (p.tokens == 1 || row_stride * item % 16 == 0);
}

// The parameters of a launch for `tokens` tokens, from token `first` on.
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

// The kernel of a key, which `make` loads at the first call. It is never unloaded, and the map never destroyed, because
// the driver may be unloaded first.
template <typename Key, typename Make>
Function loaded(const Key& key, const Make& make) {
    static std::mutex mutex;
    static auto* kernels = new std::map<Key, Function>;
    const std::lock_guard lock(mutex);
    Function& function = (*kernels)[key];
    if (function == nullptr) function = make();
    return function;
}

Function load_cubin(const DeviceFacts& device, int index, unsigned shared_bytes) {
    const Cubin& cubin = kernels().cubins[index];
    return loaded(std::tuple(device.device, index, shared_bytes),
                  [&] { return load(cubin.code, cubin.kernel, shared_bytes); });
}

std::string define(const char* name, int value) { return std::string("-D") + name + "=" + std::to_string(value); }

Function compile_plain(const DeviceFacts& device, const Variant& variant, int tokens) {
    return loaded(std::tuple(device.device, variant, tokens), [&] {
        const std::vector<char> code =
            compile(sources_of("plain.cu"), variant.arch,
                    {define("MGLU_ELEMENT", variant.element), define("MGLU_WEIGHT_FORMAT", variant.weight_format),
                     define("MGLU_N_MASKS", variant.n_masks), define("MGLU_ACTIVATION", variant.activation),
                     define("MGLU_MASK_WEIGHTS", variant.mask_weight), define("MGLU_TOKENS", tokens)});
        return load(code.data(), "mglu_plain", 0);
    });
}

// The kernel that rounds x to a copy in its type.
Function compile_quantize_x(const DeviceFacts& device, int arch, int element) {
    return loaded(std::tuple(device.device, arch, element), [&] {
        const std::vector<char> code = compile(sources_of("quantize_x.cu"), arch,
                                               {define("MGLU_ELEMENT", element), define("MGLU_TOKEN_COLUMNS", 0)});
        return load(code.data(), "mglu_quantize_x", 0);
    });
}

// The first row of a table that fits; null if none does.
template <typename Row, typename Fits>
const Row* find(std::span<const Row> table, const Fits& fits) {
    const auto found = std::ranges::find_if(table, fits);
    return found != table.end() ? &*found : nullptr;
}

const TunedLaunch* find_tuned(const Variant& variant, const DeviceFacts& device, const LayerCall& call,
                              std::int64_t tokens) {
    return find(kernels().tuned, [&](const TunedLaunch& row) {
        return serves(row.variant, variant) && row.out_features == call.out_features &&
               row.in_features == call.in_features && row.first_tokens <= tokens && tokens <= row.last_tokens &&
               row.shared_bytes <= static_cast<unsigned>(device.max_shared_bytes_per_block);
    });
}

unsigned grid_blocks(const TunedLaunch& tuned, const DeviceFacts& device) {
    if (!tuned.persistent) return tuned.blocks;
    const unsigned clusters = std::max(static_cast<unsigned>(device.sms) / tuned.cluster, 1u);
    return std::min(tuned.blocks, clusters * tuned.cluster);
}

// The shared memory that a block requests: more than 1 / (blocks_per_sm + 1) of an SM's, so that at most blocks_per_sm
// blocks fit on it.
unsigned reserved_shared_bytes(const TunedLaunch& tuned, const DeviceFacts& device) {
    if (tuned.blocks_per_sm == 0) return tuned.shared_bytes;
    const int share = device.shared_bytes_per_sm / static_cast<int>(tuned.blocks_per_sm + 1);
    return std::max(tuned.shared_bytes, static_cast<unsigned>(share - device.reserved_shared_bytes_per_block + 128));
}

std::int64_t round_up(std::int64_t size, std::int64_t multiple) { return (size + multiple - 1) / multiple * multiple; }

// The tokens and the bytes of a rounded x, in fp8 for tiles of `block_tokens` tokens, or in x's type for 0.
std::int64_t rounded_tokens(const Params& p, int block_tokens) {
    return block_tokens > 0 ? round_up(p.tokens, block_tokens) : p.tokens;
}
std::int64_t rounded_bytes(const Params& p, int block_tokens, std::int64_t item) {
    return rounded_tokens(p, block_tokens) *
           (block_tokens > 0 ? round_up(p.in_features, 128) + 4 : p.in_features * item);
}

// Rounds x to `out`, which the kernels after it read in its place.
void round_x(Params& p, void* out, int block_tokens, Function kernel, bool overlap, std::int64_t item, void* stream) {
    Params given = p;
    given.out = out;
    const auto blocks = static_cast<unsigned>(rounded_tokens(p, block_tokens));
    launch(kernel, {blocks, 1, kCopyThreads, 0, overlap}, stream, &given);
    set_x(p, out, p.in_features, 1, item);
}

// Copies a tensor to `out`, in the form that the kernel reads in its place. `pointer` becomes the address of the copy.
void copy(const void*& pointer, void* out, const CopyLaunch& by, bool overlap, const DeviceFacts& device, Params p,
          void* stream) {
    p.out = out;
    launch(load_cubin(device, by.cubin, 0), {by.blocks, 1, kCopyThreads, 0, overlap}, stream, &p);
    pointer = out;
}

TileParams tile_parameters(const TunedLaunch& tuned, const Params& p) {
    const Boxes& box = tuned.boxes;
    const auto height = static_cast<std::uint64_t>(p.out_features), width = static_cast<std::uint64_t>(p.in_features);
    TileParams tile{};
    static_cast<Params&>(tile) = p;
    const bool in_fp8 = tuned.quantize_x.block_tokens > 0;
    const std::uint64_t stored = width * box.weight_columns / (in_fp8 ? 128 : 64);
    tile.weight_map = encode(
        {box.weight_item_bytes, stored, height, box.weight_item_bytes * stored, box.weight_columns, box.rows, true},
        p.weight);
    if (tuned.permute_x.cubin < 0 && !in_fp8) {
        const auto tokens = static_cast<std::uint32_t>(p.tokens);
        const auto pitch = static_cast<std::uint64_t>(2 * p.x_row_stride);
        tile.x_map = encode({2, width, tokens, pitch, 64, std::min(box.tokens, tokens), true}, p.x);
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
    // One allocation for all copies, since a second one may free the first.
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

// Prints a message once per process.
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
    const auto ceil_div = [](int a, int b) { return static_cast<unsigned>((a + b - 1) / b); };
    const Geometry geometry{ceil_div(p.out_features, kPlainWarps), ceil_div(p.tokens, tokens), kPlainThreads, 0, false};
    const PlainKernel* found = find(kernels().plain, [&](const PlainKernel& plain) {
        return serves(plain.variant, variant) && plain.tokens == tokens;
    });
    if (variant.rounds_x) {
        const Function kernel = found != nullptr ? load_cubin(device, found->quantize_x, 0)
                                                 : compile_quantize_x(device, variant.arch, variant.element);
        round_x(p, executor.allocate(rounded_bytes(p, 0, item)), 0, kernel, false, item, executor.stream);
    }
    launch(found != nullptr ? load_cubin(device, found->cubin, 0) : compile_plain(device, variant, tokens), geometry,
           executor.stream, &p);
}

}  // namespace

void forward(const LayerCall& call, void* out, const Executor& executor) {
    if (call.out_features >= INT32_MAX || call.in_features >= 1 << 28)
        refuse("weight: got shape " + call.weight.shape() + ", beyond the kernels' 32-bit indices");
    const DeviceFacts& device = current_device();
    if (device.arch < 80) throw std::runtime_error("mglu: the GPU kernels need compute capability 8.0");
    const auto& mask_weight = call.mask_weights;
    const Variant variant{.arch = device.arch,
                          .element = element("x", call.x.dtype),
                          .weight_format = static_cast<int>(call.weight_format),
                          .rounds_x = call.rounds_x,
                          .n_masks = static_cast<int>(call.n_masks),
                          .activation = call.activation,
                          .mask_weight = mask_weight ? element("mask_weights", mask_weight->dtype) : -1};
    const std::int64_t item = item_bytes(call.x.dtype);
    const bool tuned_layout = has_tuned_layout(call);
    for (std::int64_t first = 0; first < call.tokens; first += kMaxTokens) {
        const std::int64_t tokens = std::min(kMaxTokens, call.tokens - first);
        const Params p = parameters(call, out, first, tokens);
        const TunedLaunch* tuned = tuned_layout ? find_tuned(variant, device, call, tokens) : nullptr;
        if (tuned != nullptr) {
            launch_tuned(*tuned, device, p, item, executor);
        } else {
            say_that_the_kernel_is_slow(call);
            launch_plain(variant, device, p, item, executor);
        }
    }
}

}  // namespace mglu::cuda
