// Fuzzes the code that reads files and tensor metadata from outside. Build it with sanitizers; it needs no torch.
//
//   fuzz SECONDS PACKAGE
//
// The program truncates and changes a package, and the check of the seal must find every change. It also calls the
// operators on tensors with random metadata, valid or not, and must run the calls that the checks accept. The random
// numbers are the same in each run, so that failures repeat. The exit code is 1 if a check is wrong.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <optional>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "../../cpu/mglu_cpu.h"
#include "../experts.h"
#include "../formats.h"
#include "../forward.h"
#include "../masks.h"
#include "../seal.h"

namespace {

using Clock = std::chrono::steady_clock;

[[noreturn]] void fail(const std::string& message) {
    std::fprintf(stderr, "fuzz: %s\n", message.c_str());
    std::exit(1);
}

class Random {
  public:
    std::uint64_t below(std::uint64_t limit) { return limit == 0 ? 0 : engine_() % limit; }
    bool chance(int percent) { return below(100) < static_cast<std::uint64_t>(percent); }
    template <typename T, std::size_t n>
    T pick(const T (&values)[n]) {
        return values[below(n)];
    }

  private:
    std::mt19937_64 engine_{2506};
};

bool is_accepted(const std::string& package) {
    std::istringstream file(package);
    try {
        return mglu::read_seal(file).kind == "package";
    } catch (const std::runtime_error&) {
        return false;
    }
}

void fuzz_seal(const std::string& package, Random& random, Clock::time_point end, long& runs) {
    if (!is_accepted(package)) fail("the whole package is refused");
    for (std::size_t size = 0; size < package.size(); ++size)
        if (is_accepted(package.substr(0, size)))
            fail("a package truncated to " + std::to_string(size) + " bytes is accepted");
    const char extremes[] = {0x00, 0x01, 0x7f, '\x80', '\xff', ' ', '=', '9'};
    for (; Clock::now() < end; ++runs) {
        std::string changed = package;
        const std::size_t tail = std::min<std::size_t>(changed.size(), 256);  // contains the seal
        for (std::uint64_t n = 1 + random.below(6); n > 0; --n)
            changed[changed.size() - 1 - random.below(random.chance(70) ? tail : changed.size())] =
                random.pick(extremes);
        if (changed != package && is_accepted(changed)) fail("a change of bytes is not found");
    }
}

// A tensor with its metadata, in an allocation of exactly the bytes that it spans.
struct Owned {
    mglu::Tensor tensor;
    std::vector<std::int64_t> sizes, strides;
    std::unique_ptr<unsigned char[]> data;
};

std::unique_ptr<Owned> make(Random& random, std::vector<std::int64_t> sizes, mglu::Scalar dtype, bool zeros_and_ones) {
    auto owned = std::make_unique<Owned>();
    if (random.chance(8) && !sizes.empty()) sizes[random.below(sizes.size())] += random.chance(50) ? 1 : 7;
    if (random.chance(4)) sizes.push_back(1 + static_cast<std::int64_t>(random.below(3)));
    if (random.chance(4) && !sizes.empty()) sizes.pop_back();
    if (random.chance(4) && !sizes.empty()) sizes[random.below(sizes.size())] = 0;
    owned->sizes = sizes;
    owned->strides.assign(sizes.size(), 1);
    std::int64_t span = 1;
    const std::int64_t gap = random.chance(20) ? 3 : 0;
    for (std::size_t i = sizes.size(); i-- > 0;) {
        owned->strides[i] = random.chance(5) ? 0 : span;
        span = span * std::max<std::int64_t>(sizes[i], 1) + gap;
    }
    std::int64_t last = 0;
    bool is_empty = false;
    for (std::size_t i = 0; i < sizes.size(); ++i) {
        is_empty = is_empty || sizes[i] == 0;
        last += (std::max<std::int64_t>(sizes[i], 1) - 1) * owned->strides[i];
    }
    const std::size_t bytes = is_empty ? 0 : static_cast<std::size_t>(last + 1) * mglu::item_bytes(dtype);
    owned->data.reset(new unsigned char[bytes]);
    for (std::size_t i = 0; i < bytes; ++i)
        owned->data[i] = static_cast<unsigned char>(zeros_and_ones ? random.below(2) : random.below(256));
    owned->tensor.data = owned->data.get();
    owned->tensor.dims = static_cast<std::int64_t>(sizes.size());
    owned->tensor.sizes = owned->sizes.data();
    owned->tensor.strides = owned->strides.data();
    owned->tensor.dtype = dtype;
    return owned;
}

std::unique_ptr<Owned> result(const std::vector<std::int64_t>& sizes, mglu::Scalar dtype) {
    auto owned = std::make_unique<Owned>();
    std::int64_t count = 1;
    owned->sizes = sizes;
    owned->strides.assign(sizes.size(), 1);
    for (std::size_t i = sizes.size(); i-- > 0;) owned->strides[i] = count, count *= sizes[i];
    owned->data.reset(new unsigned char[static_cast<std::size_t>(count) * mglu::item_bytes(dtype)]);
    owned->tensor = {owned->data.get(),
                     static_cast<std::int64_t>(sizes.size()),
                     owned->sizes.data(),
                     owned->strides.data(),
                     dtype,
                     mglu::Device::cpu,
                     -1};
    return owned;
}

constexpr mglu::Scalar kFloats[] = {mglu::Scalar::float16, mglu::Scalar::bfloat16, mglu::Scalar::float32,
                                    mglu::Scalar::float64};
constexpr mglu::Scalar kAny[] = {mglu::Scalar::uint8,    mglu::Scalar::int8,           mglu::Scalar::int16,
                                 mglu::Scalar::int32,    mglu::Scalar::int64,          mglu::Scalar::float16,
                                 mglu::Scalar::float32,  mglu::Scalar::float64,        mglu::Scalar::boolean,
                                 mglu::Scalar::bfloat16, static_cast<mglu::Scalar>(99)};

// Makes a tensor that rarely has another dtype than usual.
std::unique_ptr<Owned> draw(Random& random, std::vector<std::int64_t> sizes, mglu::Scalar usual) {
    return make(random, std::move(sizes), random.chance(3) ? random.pick(kAny) : usual, false);
}

// Calls an operator over experts. Some expert ids or offs are out of range.
void fuzz_experts(Random& random, const char* activation) {
    const mglu::Executor executor{mglu::cpu::serial};
    const auto below = [&](int limit) { return static_cast<std::int64_t>(random.below(limit)); };
    const std::int64_t tokens = below(12), top_k = below(4), experts = below(5), d = below(20), n = below(5);
    const mglu::Format& format = random.pick(mglu::kFormats);
    const std::int64_t h = format.packed * below(70);
    const mglu::Scalar dtype = random.pick(kFloats);
    std::vector<std::int64_t> scales = format.scale_sizes(d, h);
    scales.insert(scales.begin(), experts);
    const auto weight = draw(random, {experts, d, h / format.packed}, format.dtype.value_or(dtype));
    const auto scale = draw(random, scales, format.scale_dtype);
    const std::optional<mglu::Tensor> given_scale = format.dtype ? std::optional(scale->tensor) : std::nullopt;
    const bool is_sorted = random.chance(30), is_down = random.chance(40);
    const auto routing = is_sorted && !is_down ? draw(random, {experts}, mglu::Scalar::int32)
                                               : draw(random, {tokens, top_k},
                                                      random.chance(50) ? mglu::Scalar::int32 : mglu::Scalar::int64);
    if (!routing->tensor.is_contiguous()) return;
    for (std::int64_t i = 0; i < routing->tensor.elements(); ++i) {  // most numbers are in range
        const std::int64_t value = random.chance(80) ? below(6) : below(1 << 30) - (1 << 29);
        if (routing->tensor.dtype == mglu::Scalar::int32)
            static_cast<std::int32_t*>(routing->tensor.data)[i] = static_cast<std::int32_t>(value);
        else if (routing->tensor.dtype == mglu::Scalar::int64)
            static_cast<std::int64_t*>(routing->tensor.data)[i] = value;
    }
    if (is_down) {
        const auto y = draw(random, {tokens, top_k, h}, dtype),
                   factors = draw(random, {tokens, top_k}, random.pick(kFloats));
        const mglu::DownCall call =
            mglu::describe_down(y->tensor, weight->tensor, routing->tensor, factors->tensor, given_scale, format.name);
        const bool has_dense_rows = weight->tensor.last_size() <= 1 || weight->tensor.last_stride() == 1;
        if (!y->tensor.is_contiguous() || !factors->tensor.is_contiguous() || !has_dense_rows ||
            (given_scale && !scale->tensor.is_contiguous()))
            return;
        const auto zero = [](const mglu::Tensor&, std::int64_t, const mglu::Tensor& out) {
            std::memset(out.data, 0, static_cast<std::size_t>(out.elements() * mglu::item_bytes(out.dtype)));
        };
        mglu::experts_down(call, result(call.result_sizes(), y->tensor.dtype)->tensor, executor, zero);
        return;
    }
    const std::int64_t rows = is_sorted ? tokens * top_k : tokens;
    const auto x = draw(random, {rows, h}, dtype),
               masks = draw(random, {experts, d, (h + 7) / 8, n}, mglu::Scalar::uint8);
    const auto mask_weights = is_sorted ? draw(random, {rows, n}, random.pick(kFloats))
                                        : draw(random, {tokens, top_k, n}, random.pick(kFloats));
    const std::optional<mglu::Tensor> given_weights =
        random.chance(40) ? std::optional(mask_weights->tensor) : std::nullopt;
    const mglu::ExpertsCall call =
        mglu::describe_experts({{activation, format.name, random.chance(80) ? "dense" : "fp8_token", is_sorted},
                                x->tensor,
                                weight->tensor,
                                masks->tensor,
                                given_weights,
                                given_scale,
                                routing->tensor});
    if (!mglu::needed_copies(call).any())
        mglu::forward(call, result(call.result_sizes(), x->tensor.dtype)->tensor, executor);
}

void fuzz_tensors(Random& random, Clock::time_point end, long& accepted, long& refused) {
    const mglu::Executor executor{mglu::cpu::serial};
    const char* activations[] = {
#define MGLU_ACTIVATION(name, ...) #name,
#include "../../cpu/activation.h"
        "", "silu ", "SILU"};
    // The loop goes on until more than 50 calls are accepted and more than 50 refused, even on a slow machine. If the
    // checks refused everything, it would never end, and the test would time out.
    while (Clock::now() < end || accepted <= 50 || refused <= 50) {
        const auto d = static_cast<std::int64_t>(random.below(40)), h = static_cast<std::int64_t>(random.below(200));
        const auto n = static_cast<std::int64_t>(random.below(18)),
                   tokens = static_cast<std::int64_t>(random.below(12));
        const mglu::Scalar dtype = random.pick(kFloats);
        try {
            if (random.chance(60)) {
                const mglu::Format& format = random.pick(mglu::kFormats);
                const bool has_scale = random.chance(format.dtype ? 97 : 3);
                const auto x = draw(random, {tokens, h}, dtype);
                const auto weight = draw(random, {d, h / format.packed}, format.dtype.value_or(dtype));
                const auto scale = draw(random, format.scale_sizes(d, h), format.scale_dtype);
                const auto masks = draw(random, {d, (h + 7) / 8, n}, mglu::Scalar::uint8);
                const auto mask_weight = make(random, {tokens, n}, random.pick(kFloats), false);
                const std::optional<mglu::Tensor> given =
                    random.chance(40) ? std::optional(mask_weight->tensor) : std::nullopt;
                const std::optional<mglu::Tensor> given_scale = has_scale ? std::optional(scale->tensor) : std::nullopt;
                const mglu::LayerCall call =
                    mglu::describe({{random.pick(activations), format.name, random.chance(70) ? "dense" : "fp8_token"},
                                    x->tensor,
                                    weight->tensor,
                                    masks->tensor,
                                    given,
                                    given_scale});
                if (mglu::needed_copies(call).any()) continue;
                mglu::forward(call, result(call.result_sizes(), call.x.dtype)->tensor, executor);
            } else if (random.chance(50)) {
                fuzz_experts(random, random.pick(activations));
            } else if (random.chance(50)) {
                const auto masks = make(random, {n, d, h}, random.pick(kAny), random.chance(60));
                mglu::check_masks(masks->tensor);
                mglu::pack_masks(masks->tensor, result(mglu::packed_sizes(masks->tensor), mglu::Scalar::uint8)->tensor,
                                 executor);
            } else {
                const auto packed = draw(random, {d, (h + 7) / 8, n}, mglu::Scalar::uint8);
                const std::int64_t extremes[] = {h, h, h, h + 1, h - 9, -1, INT64_MIN, INT64_MAX};
                const std::int64_t in_features = random.pick(extremes);
                mglu::check_packed(packed->tensor, in_features);
                const auto masks = result({packed->sizes[2], packed->sizes[0], in_features}, mglu::Scalar::boolean);
                mglu::unpack_masks(packed->tensor, in_features, masks->tensor, executor);
            }
            ++accepted;
        } catch (const std::invalid_argument&) {
            ++refused;
        }
    }
}

}  // namespace

int main(int count, char** arguments) {
    if (count != 3) fail("usage: fuzz SECONDS PACKAGE");
    std::ifstream file(arguments[2], std::ios::binary);
    const std::string package((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    const auto half =
        std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(std::atof(arguments[1]) / 2));
    Random random;
    long packages = 0, accepted = 0, refused = 0;
    fuzz_seal(package, random, Clock::now() + half, packages);
    fuzz_tensors(random, Clock::now() + half, accepted, refused);
    std::printf("%ld packages, %ld calls refused, %ld run\n", packages, refused, accepted);
    return 0;
}
