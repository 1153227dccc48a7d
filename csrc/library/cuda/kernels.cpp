#include "kernels.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

// Defines `symbol` as the bytes of a file, followed by a 0. The assembler searches for the file in the paths of -Wa,-I.
#define MGLU_EMBED(symbol, file)                                                                   \
    asm(".section .rodata\n.balign 64\n" #symbol ":\n.incbin \"" file "\"\n.byte 0\n.previous\n"); \
    extern "C" __attribute__((visibility("hidden"))) const unsigned char symbol[]

// CMake writes this file: an MGLU_EMBED of each source, and MGLU_SOURCES with their names and symbols.
#include "mglu_sources.inc"

// mglu_ops/packaging/device_code.py writes this file: an MGLU_EMBED of each cubin, and three tables that end with an
// empty row.
#if __has_include("mglu_kernels.inc")
#include "mglu_kernels.inc"
#else
namespace mglu::cuda {
constexpr Cubin kCubins[] = {{}};
constexpr TunedLaunch kTuned[] = {{}};
constexpr PlainKernel kPlain[] = {{}};
}  // namespace mglu::cuda
#endif

namespace mglu::cuda {

namespace {

template <typename Row, std::size_t size>
std::span<const Row> rows_of(const Row (&table)[size]) {
    return std::span(table).first(size - 1);
}

// True if a kernel that was compiled for `built` serves `wanted`, whose `arch` is the device's. A cubin runs on its own
// architecture and on later minor versions of the same major version.
bool serves(const Variant& built, Variant wanted) {
    if (built.arch / 10 == wanted.arch / 10 && built.arch <= wanted.arch) wanted.arch = built.arch;
    return built == wanted;
}

bool is_of(const Layer& layer, const TunedLaunch& row, const DeviceFacts& device) {
    return serves(row.variant, layer.variant) && row.out_features == layer.out_features &&
           row.in_features == layer.in_features && row.items.experts == layer.experts &&
           row.items.top_k == layer.top_k &&
           row.shared_bytes <= static_cast<unsigned>(device.max_shared_bytes_per_block);
}

// Returns the first row of a table that fits, or null.
template <typename Row, typename Fits>
const Row* find(std::span<const Row> table, const Fits& fits) {
    const auto found = std::ranges::find_if(table, fits);
    return found != table.end() ? &*found : nullptr;
}

// Returns the kernel of a key. At the first call with the key, `make` loads the kernel. Neither kernels nor the map are
// ever freed, because the driver may be unloaded before static objects are destroyed.
template <typename Key, typename Make>
Function loaded(const Key& key, const Make& make) {
    static std::mutex mutex;
    static auto* kernels = new std::map<Key, Function>;
    const std::lock_guard lock(mutex);
    Function& function = (*kernels)[key];
    if (function == nullptr) function = make();
    return function;
}

std::string define(const char* name, int value) { return std::string("-D") + name + "=" + std::to_string(value); }

// The sources that NVRTC needs to compile a kernel: its own first, then all headers of csrc/cuda.
std::vector<Source> sources_of(std::string_view name) {
    const auto source = [](const char* file, const unsigned char* text) {
        return Source{file, reinterpret_cast<const char*>(text)};
    };
    std::vector<Source> sources{MGLU_SOURCES(source)};
    std::swap(sources.front(), *std::ranges::find(sources, name, &Source::name));
    return sources;
}

}  // namespace

const TunedLaunch* find_tuned(const Layer& layer, const DeviceFacts& device, std::int64_t tokens) {
    return find(rows_of(kTuned), [&](const TunedLaunch& row) {
        return is_of(layer, row, device) && row.first_tokens <= tokens && tokens <= row.last_tokens;
    });
}

std::int64_t most_tokens(const Layer& layer, const DeviceFacts& device) {
    std::int64_t most = 0;
    for (const TunedLaunch& row : rows_of(kTuned))
        if (is_of(layer, row, device)) most = std::max(most, row.last_tokens);
    return most;
}

const PlainKernel* find_plain(const Variant& variant, int tokens) {
    return find(rows_of(kPlain),
                [&](const PlainKernel& plain) { return serves(plain.variant, variant) && plain.tokens == tokens; });
}

Function load_cubin(const DeviceFacts& device, int index, unsigned shared_bytes) {
    const Cubin& cubin = kCubins[index];
    return loaded(std::tuple(device.device, index, shared_bytes),
                  [&] { return load(cubin.code, cubin.kernel, shared_bytes); });
}

Function compile_plain(const DeviceFacts& device, const Variant& variant, int tokens, int items) {
    return loaded(std::tuple(device.device, variant, tokens, items), [&] {
        const std::vector<char> code =
            compile(sources_of("plain.cu"), variant.arch,
                    {define("MGLU_ELEMENT", variant.element), define("MGLU_WEIGHT_FORMAT", variant.weight_format),
                     define("MGLU_N_MASKS", variant.n_masks), define("MGLU_ACTIVATION", variant.activation),
                     define("MGLU_MASK_WEIGHTS", variant.mask_weight), define("MGLU_TOKENS", tokens),
                     define("MGLU_ITEMS", items)});
        return load(code.data(), "mglu_plain", 0);
    });
}

Function compile_quantize_x(const DeviceFacts& device, int arch, int element) {
    return loaded(std::tuple(device.device, arch, element), [&] {
        const std::vector<char> code = compile(sources_of("quantize_x.cu"), arch,
                                               {define("MGLU_ELEMENT", element), define("MGLU_TOKEN_COLUMNS", 0)});
        return load(code.data(), "mglu_quantize_x", 0);
    });
}

Function compile_group_tokens(const DeviceFacts& device, bool is_sorted, unsigned shared_bytes) {
    return loaded(std::tuple(device.device, is_sorted, shared_bytes), [&] {
        const std::vector<char> code =
            compile(sources_of("group_tokens.cu"), device.arch, {define("MGLU_SORTED", is_sorted)});
        return load(code.data(), "mglu_group_tokens", shared_bytes);
    });
}

}  // namespace mglu::cuda
