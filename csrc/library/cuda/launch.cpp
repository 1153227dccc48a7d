#include "launch.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

#include "kernels.h"

namespace mglu::cuda {

namespace {

// csrc/cuda/params.cuh
struct Params {
    const void *x, *weight, *masks, *route;
    void* out;
    std::int64_t x_row_stride, x_column_stride, weight_row_stride, weight_column_stride;
    std::int64_t mask_row_stride, mask_octet_stride, mask_stride, route_row_stride, route_column_stride;
    std::int32_t tokens, out_features, in_features, x_is_vectorizable;
};
static_assert(sizeof(Params) == 128);

// csrc/cuda/tile.cuh
struct TileParams {
    Params params;
    TensorMap x, weight, masks;
};
static_assert(sizeof(TileParams) == 512);

constexpr std::int64_t kMostTokens = 512;  // of a launch; more go in several
constexpr unsigned kPlainThreads = 256, kPlainWarps = 8, kTurnThreads = 256;

int element(const char* what, Scalar dtype) {
    switch (dtype) {
        case Scalar::float16: return 0;
        case Scalar::bfloat16: return 1;
        case Scalar::float32: return 2;
        default: throw std::invalid_argument(std::string(what) + ": got dtype " + name(dtype) +
                                             ", the GPU kernels have float16, bfloat16 and float32");
    }
}

bool aligned(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0; }

// Whether the layout is the one that tuned kernels were compiled for: whole, and in 16-byte vectors.
bool is_tuned_layout(const Layer& layer) {
    return layer.weight.is_contiguous() && layer.packed_masks.is_contiguous() && aligned(layer.weight.data) &&
           aligned(layer.packed_masks.data);
}

// Cubins of one major architecture run on its later minor ones.
bool runs_on(int built, int device) { return built / 10 == device / 10 && built <= device; }

Params parameters(const Call& call, std::int64_t first, std::int64_t tokens) {
    const Layer& layer = *call.layer;
    const std::int64_t item = layer.x.dtype == Scalar::float32 ? 4 : 2;
    const std::int64_t* weight = layer.weight.strides;
    const std::int64_t* masks = layer.packed_masks.strides;
    Params p{};
    p.x = static_cast<const char*>(layer.x.data) + first * call.x_row_stride * item;
    p.weight = layer.weight.data;
    p.masks = layer.packed_masks.data;
    p.out = static_cast<char*>(call.out) + first * layer.weight.sizes[0] * item;
    p.x_row_stride = call.x_row_stride;
    p.x_column_stride = layer.x.strides[layer.x.dims - 1];
    p.weight_row_stride = weight[0];
    p.weight_column_stride = weight[1];
    p.mask_row_stride = masks[0];
    p.mask_octet_stride = masks[1];
    p.mask_stride = masks[2];
    if (const Tensor* route = layer.route_weights) {
        const std::int64_t route_item = route->dtype == Scalar::float32 ? 4 : 2;
        p.route = static_cast<const char*>(route->data) + first * call.route_row_stride * route_item;
        p.route_row_stride = call.route_row_stride;
        p.route_column_stride = route->strides[route->dims - 1];
    }
    p.tokens = static_cast<std::int32_t>(tokens);
    p.out_features = static_cast<std::int32_t>(layer.weight.sizes[0]);
    p.in_features = static_cast<std::int32_t>(layer.weight.sizes[1]);
    p.x_is_vectorizable = p.x_column_stride == 1 && aligned(p.x) && (tokens == 1 || call.x_row_stride * item % 16 == 0);
    return p;
}

// Kernels that were loaded, by device: modules belong to its context, and stay.
class Loaded {
  public:
    Function cubin(int device, int index, unsigned shared_bytes) {
        const std::lock_guard lock(mutex_);
        Function& function = cubins_[{device, index, shared_bytes}];
        const Cubin& cubin = kernels().cubins[index];
        if (function == nullptr) function = load(cubin.code, cubin.name, shared_bytes);
        return function;
    }
    Function compiled(int device, const Variant& variant, int tokens) {
        const std::lock_guard lock(mutex_);
        Function& function = compiled_[{device, variant.element, variant.n_masks, variant.activation, variant.route, tokens}];
        if (function == nullptr) {
            const auto define = [](const char* name, int value) { return std::string("-D") + name + "=" + std::to_string(value); };
            const std::vector<char> code =
                compile(plain_sources(), variant.arch,
                        {define("MGLU_ELEMENT", variant.element), define("MGLU_N_MASKS", variant.n_masks),
                         define("MGLU_ACTIVATION", variant.activation), define("MGLU_ROUTE", variant.route),
                         define("MGLU_TOKENS", tokens)});
            function = load(code.data(), "mglu_plain", 0);
        }
        return function;
    }

  private:
    std::mutex mutex_;
    std::map<std::tuple<int, int, unsigned>, Function> cubins_;
    std::map<std::tuple<int, int, int, int, int, int>, Function> compiled_;
};

Loaded& loaded() {
    static auto* kernels = new Loaded;  // not destroyed: the driver may be gone before
    return *kernels;
}

const TunedLaunch* find_tuned(const Variant& variant, const Layer& layer, std::int64_t tokens) {
    const Kernels all = kernels();
    for (const TunedLaunch* launch = all.tuned; launch != all.tuned + all.n_tuned; ++launch) {
        Variant wanted = variant;
        if (runs_on(launch->variant.arch, variant.arch)) wanted.arch = launch->variant.arch;
        if (launch->variant == wanted && launch->out_features == layer.weight.sizes[0] &&
            launch->in_features == layer.weight.sizes[1] && launch->first_tokens <= tokens && tokens <= launch->last_tokens)
            return launch;
    }
    return nullptr;
}

void launch_tuned(const TunedLaunch& tuned, int device, Params& p, const Executor& executor) {
    if (tuned.turn.cubin >= 0) {
        Params turn = p;
        turn.out = executor.allocate(tuned.turn.bytes, executor.context);
        const Geometry geometry{tuned.turn.blocks, 1, kTurnThreads, 0, tuned.geometry.overlap};
        launch(loaded().cubin(device, tuned.turn.cubin, 0), geometry, executor.stream, &turn);
        p.x = turn.out;
    }
    const Function kernel = loaded().cubin(device, tuned.cubin, tuned.geometry.shared_bytes);
    if (tuned.boxes.rows == 0) return launch(kernel, tuned.geometry, executor.stream, &p);
    const Boxes& box = tuned.boxes;
    const auto height = static_cast<std::uint64_t>(p.out_features), width = static_cast<std::uint64_t>(p.in_features);
    const auto mask_pitch = static_cast<std::uint64_t>(p.mask_row_stride);
    TileParams tile{p, {}, encode({2, width, height, 2 * width, 64, box.rows, true}, p.weight), {}};
    if (tuned.turn.cubin < 0) {
        const auto tokens = static_cast<std::uint32_t>(p.tokens);
        const auto pitch = static_cast<std::uint64_t>(2 * p.x_row_stride);
        tile.x = encode({2, width, tokens, pitch, 64, std::min(box.tokens, tokens), true}, p.x);
    }
    if (box.mask_bytes > 0)
        tile.masks = encode({1, mask_pitch, height, mask_pitch, box.mask_bytes, box.rows, box.swizzle_masks}, p.masks);
    launch(kernel, tuned.geometry, executor.stream, &tile);
}

// A message once a process, where the road is right but slow.
void say_once_that_it_is_slow(const Layer& layer) {
    static std::once_flag said;
    std::call_once(said, [&] {
        std::fprintf(stderr,
                     "mglu: this libmglu_ops.so has no tuned kernel for a layer with weight %s, and uses the plain one, "
                     "several times slower; build it with --arch and --package for this GPU and this model\n",
                     layer.weight.shape().c_str());
    });
}

void launch_plain(const Variant& variant, int device, Params& p, void* stream) {
    const int tokens = p.tokens == 1 ? 1 : 4;
    const auto ceil_div = [](int a, int b) { return static_cast<unsigned>((a + b - 1) / b); };
    const Geometry geometry{ceil_div(p.out_features, kPlainWarps), ceil_div(p.tokens, tokens), kPlainThreads, 0, false};
    const Kernels all = kernels();
    const PlainKernel* found = std::find_if(all.plain, all.plain + all.n_plain, [&](const PlainKernel& plain) {
        Variant wanted = variant;
        if (runs_on(plain.variant.arch, variant.arch)) wanted.arch = plain.variant.arch;
        return plain.variant == wanted && plain.tokens == tokens;
    });
    const Function function = found != all.plain + all.n_plain ? loaded().cubin(device, found->cubin, 0)
                                                               : loaded().compiled(device, variant, tokens);
    launch(function, geometry, stream, &p);
}

}  // namespace

void forward(const Call& call) {
    const Layer& layer = *call.layer;
    const std::int64_t* sizes = layer.weight.sizes;
    if (sizes[0] >= INT32_MAX || sizes[1] >= 1 << 28)
        throw std::invalid_argument("weight: got shape " + layer.weight.shape() + ", beyond the kernels' 32-bit indices");
    const DeviceFacts facts = current_device();
    if (facts.arch < 80) throw std::runtime_error("mglu: the GPU kernels need compute capability 8.0");
    const Variant variant{facts.arch, element("x", layer.x.dtype), static_cast<int>(layer.packed_masks.sizes[2]),
                          call.activation, layer.route_weights ? element("route_weights", layer.route_weights->dtype) : -1};
    const bool is_tuned = is_tuned_layout(layer);
    for (std::int64_t first = 0; first < call.tokens; first += kMostTokens) {
        const std::int64_t tokens = std::min(kMostTokens, call.tokens - first);
        Params p = parameters(call, first, tokens);
        const TunedLaunch* tuned = is_tuned ? find_tuned(variant, layer, tokens) : nullptr;
        if (tuned != nullptr) {
            launch_tuned(*tuned, facts.device, p, *call.executor);
        } else {
            say_once_that_it_is_slow(layer);
            launch_plain(variant, facts.device, p, call.executor->stream);
        }
    }
}

}  // namespace mglu::cuda
