#include "plan.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <tuple>

#include "../tensor.h"

// Defines `symbol` as the bytes of a file, followed by a 0. The assembler searches for the file in the paths of -Wa,-I.
#define MGLU_EMBED(symbol, file)                                                                   \
    asm(".section .rodata\n.balign 64\n" #symbol ":\n.incbin \"" file "\"\n.byte 0\n.previous\n"); \
    extern "C" __attribute__((visibility("hidden"))) const unsigned char symbol[]

// CMake writes this file. It has an MGLU_EMBED for each source, and MGLU_SOURCES, which lists their names and symbols.
#include "mglu_sources.inc"

// mglu_ops/packaging/device_code.py writes two files of plans. mglu_plans.inc is for the layers of packages, and has an
// MGLU_EMBED for each cubin. any_layer.inc is for all other layers, whose kernels NVRTC compiles. Each file has a table
// that ends with an empty row.
#if __has_include("mglu_plans.inc")
#include "mglu_plans.inc"
#else
namespace mglu::cuda::of_packages {
constexpr Plan kPlans[] = {{}};
}
#endif
#include "any_layer.inc"

namespace mglu::cuda {

namespace {

constexpr std::size_t kMapBytes = sizeof(TensorMap), kMostStructBytes = 2048;
constexpr std::int64_t kMostBlocksY = 65535;

std::int64_t round_up(std::int64_t size, std::int64_t multiple) { return (size + multiple - 1) / multiple * multiple; }

template <std::size_t size>
std::span<const Plan> rows_of(const Plan (&table)[size]) {
    return std::span(table).first(size - 1);
}

// True if a plan for the variant `built` can run the variant `wanted`, which has the `arch` of the device. A cubin runs
// on its own architecture and on later minor versions of the same major version.
bool serves(const Variant& built, Variant wanted) {
    if (built.arch == 0) return built.rounds_x == wanted.rounds_x;
    if (built.arch / 10 == wanted.arch / 10 && built.arch <= wanted.arch) wanted.arch = built.arch;
    return built == wanted;
}

bool is_one_of(std::int64_t planned, std::int64_t number) { return planned < 0 ? number > 0 : planned == number; }

bool is_for(const Plan& plan, const Layer& layer) {
    const bool has_shape =
        layer.is_packed && plan.out_features == layer.out_features && plan.in_features == layer.in_features;
    return serves(plan.variant, layer.variant) && (plan.is_for_any_shape() ? layer.variant.n_masks > 0 : has_shape) &&
           is_one_of(plan.experts, layer.experts) && is_one_of(plan.top_k, layer.top_k);
}

bool fits(const Plan& plan, Values values, std::int64_t rows, const DeviceFacts& device) {
    values.rows = rows;
    return std::ranges::all_of(plan.steps, [&](const Step& step) {
        return step.shared_bytes.at(values) <= device.max_shared_bytes_per_block;
    });
}

// Calls `visit` with each plan for a layer, the plans of packages first, until `visit` returns true.
template <typename Visit>
void visit_plans(const Layer& layer, const Visit& visit) {
    for (const auto table : {rows_of(of_packages::kPlans), rows_of(of_any_layer::kPlans)})
        for (const Plan& plan : table)
            if (is_for(plan, layer) && visit(plan)) return;
}

// --- Kernels ---------------------------------------------------------------------------------------------------------

// Returns the sources from which NVRTC compiles a kernel: the file of the kernel first, then all others of csrc/cuda.
std::vector<Source> sources_of(std::string_view name) {
    const auto source = [](const char* file, const unsigned char* text) {
        return Source{file, reinterpret_cast<const char*>(text)};
    };
    std::vector<Source> sources{MGLU_SOURCES(source)};
    std::swap(sources.front(), *std::ranges::find(sources, name, &Source::name));
    return sources;
}

std::vector<char> compile_step(const Step& step, const std::vector<std::int64_t>& macros, int arch) {
    std::vector<std::string> options;
    for (std::size_t i = 0; i < macros.size(); ++i)
        options.push_back("-D" + std::string(step.macros[i].name) + "=" + std::to_string(macros[i]));
    return compile(sources_of(step.source), arch, options);
}

// Returns the kernel of a step. The first call compiles it if necessary, and loads it into the current context. Kernels
// and the map of kernels are never freed, because the driver may be unloaded before static objects are destroyed.
Function function_of(const Step& step, const Values& values, const DeviceFacts& device, unsigned shared_bytes) {
    struct Loaded {
        Function function = nullptr;
        unsigned shared_bytes = 0;
    };
    using Key = std::tuple<int, const unsigned char*, std::string_view, std::vector<std::int64_t>>;
    static std::mutex mutex;
    static auto* kernels = new std::map<Key, Loaded>;
    std::vector<std::int64_t> macros;
    for (const Macro& macro : step.macros) macros.push_back(macro.value.at(values));
    const std::lock_guard lock(mutex);
    Loaded& kernel = (*kernels)[{device.device, step.code, step.source, macros}];
    if (kernel.function == nullptr)
        kernel.function = step.code != nullptr ? load(step.code, step.kernel)
                                               : load(compile_step(step, macros, device.arch).data(), step.kernel);
    if (shared_bytes > kernel.shared_bytes) {
        allow_shared(kernel.function, shared_bytes, step.kernel);
        kernel.shared_bytes = shared_bytes;
    }
    return kernel.function;
}

// --- Launches --------------------------------------------------------------------------------------------------------

// A struct of a kernel's parameters, in memory.
class Parameters {
  public:
    void fill(const Struct& fields, const Values& values, Addresses& addresses) {
        for (const std::string_view name : fields.pointers) append(addresses[name]);
        for (const Size& size : fields.longs) append(size.at(values));
        for (const Size& size : fields.ints) append(static_cast<std::int32_t>(size.at(values)));
    }

    void fill_maps(const Step& step, const Values& values, Addresses& addresses) {
        used_ = static_cast<std::size_t>(round_up(static_cast<std::int64_t>(used_), alignof(TensorMap)));
        used_ += step.unused_maps * kMapBytes;
        for (const Map& map : step.maps) {
            const auto size = [&](const Size& one) { return static_cast<std::uint64_t>(one.at(values)); };
            const Matrix matrix{map.item_bytes,
                                size(map.width),
                                size(map.height),
                                size(map.pitch),
                                static_cast<std::uint32_t>(size(map.box_width)),
                                static_cast<std::uint32_t>(size(map.box_height)),
                                map.swizzle};
            append(map.pointer.empty() ? TensorMap{} : encode(matrix, addresses[map.pointer]));
        }
    }

    void* data() { return used_ > 0 ? memory_.data() : nullptr; }

  private:
    template <typename Value>
    void append(const Value& value) {
        if (used_ + sizeof(Value) > memory_.size()) throw std::length_error("mglu: a struct of parameters is too long");
        std::memcpy(memory_.data() + used_, &value, sizeof(Value));
        used_ += sizeof(Value);
    }

    alignas(TensorMap) std::array<char, kMostStructBytes> memory_{};
    std::size_t used_ = 0;
};

unsigned blocks_of(const Size& grid, const Values& values, std::int64_t most) {
    const std::int64_t blocks = grid.at(values);
    if (blocks > most)
        refuse("x: got rows for " + std::to_string(blocks) + " blocks, must be at most " + std::to_string(most));
    return static_cast<unsigned>(blocks);
}

void launch_step(const Step& step, const Values& values, Addresses& addresses, const DeviceFacts& device,
                 void* stream) {
    const Geometry geometry{blocks_of(step.grid_x, values, INT32_MAX), blocks_of(step.grid_y, values, kMostBlocksY),
                            step.threads, static_cast<unsigned>(step.shared_bytes.at(values)),
                            step.overlap && device.arch >= 90};
    Parameters parameters, items;
    parameters.fill(step.parameters, values, addresses);
    if (step.unused_maps > 0 || !step.maps.empty()) parameters.fill_maps(step, values, addresses);
    items.fill(step.items, values, addresses);
    launch(function_of(step, values, device, geometry.shared_bytes), geometry, stream, parameters.data(), items.data());
}

}  // namespace

const Plan* find_plan(const Layer& layer, Values& values, const DeviceFacts& device) {
    const Plan* found = nullptr;
    visit_plans(layer, [&](const Plan& plan) {
        const bool takes_rows = plan.first_rows <= values.rows && values.rows <= plan.last_rows;
        if (takes_rows && fits(plan, values, values.rows, device)) found = &plan;
        return found != nullptr;
    });
    if (found != nullptr) return found;
    visit_plans(layer, [&](const Plan& plan) {
        const bool is_larger = found == nullptr || plan.last_rows > found->last_rows;
        if (is_larger && plan.last_rows < values.rows && fits(plan, values, plan.last_rows, device)) found = &plan;
        return false;
    });
    if (found != nullptr) values.rows = found->last_rows;
    return found;
}

void check_experts(std::int64_t experts, std::int64_t rows) {
    if (experts > of_any_layer::kMostExperts || rows > of_any_layer::kMostRows)
        refuse("weight: got " + std::to_string(experts) + " experts for " + std::to_string(rows) +
               " rows, must be at most " + std::to_string(of_any_layer::kMostExperts) + " for at most " +
               std::to_string(of_any_layer::kMostRows) + " rows on a GPU");
}

const void*& Addresses::operator[](std::string_view name) {
    const auto found = std::ranges::find(entries_, name, &decltype(entries_)::value_type::first);
    if (found != entries_.end()) return found->second;
    return entries_.emplace_back(name, nullptr).second;
}

void run(const Plan& plan, const Values& values, Addresses addresses, const DeviceFacts& device,
         const Executor& executor) {
    // The results of all steps share one allocation, because `allocate` may free what it returned before.
    std::int64_t bytes = 0;
    for (const Step& step : plan.steps) bytes += round_up(step.bytes.at(values), 16);
    char* memory = bytes > 0 ? static_cast<char*>(executor.allocate(bytes)) : nullptr;
    const void* const result = addresses["out"];
    for (const Step& step : plan.steps) {
        addresses["out"] = step.writes.empty() ? result : memory;
        launch_step(step, values, addresses, device, executor.stream);
        if (step.writes.empty()) continue;
        addresses[step.writes] = memory;
        memory += round_up(step.bytes.at(values), 16);
    }
}

}  // namespace mglu::cuda
