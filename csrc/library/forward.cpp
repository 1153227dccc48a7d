#include "forward.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>

#include "../cpu/kernels.h"
#include "cuda/launch.h"

namespace mglu {

namespace {

#include "../cpu/element.h"

// Rounds x, of magnitude up to 448, to the nearest number of float8_e4m3fn. Let u be the distance between neighbours
// among these numbers near x. Adding 1.5 * 2^23 * u makes float32 round to multiples of u. Below 2^-6, where
// float8_e4m3fn is subnormal, u is constant.
float rounded_to_fp8(float x) {
    const std::uint32_t exponent = bit_cast<std::uint32_t>(x) & 0x7f800000u;
    const float large = 1.5f * bit_cast<float>(std::max(exponent, 121u << 23) + (20u << 23));
    return std::copysign((x + large) - large, x);
}

template <typename Element>
constexpr float kLargest = std::numeric_limits<float>::max();
template <>
constexpr float kLargest<BFloat16> = 0x1.fep127f;
template <>
constexpr float kLargest<Float16> = 65504.0f;

// Rounds a token to fp8_token (mglu_ops/formats.py), as csrc/cuda/quantize_x.cu does on a GPU.
template <typename Element>
void round_token(const Element* x, Element* out, std::int64_t count) {
    // Magnitudes order like their bits as integers, with NaN above infinity.
    std::uint32_t greatest = 0;
    for (std::int64_t i = 0; i < count; ++i)
        greatest = std::max(greatest, bit_cast<std::uint32_t>(to_float(x[i])) & 0x7fffffffu);
    // The scale is the smallest power of two for which greatest / scale is at most 448 = 1.75 * 2^8. If the significand
    // of the greatest magnitude is above 1.75, this is the next power of two.
    const int exponent = static_cast<int>(greatest >> 23) - 8 + ((greatest & 0x7fffffu) > 0x600000u);
    const std::uint32_t power = greatest == 0 ? 127u << 23 : static_cast<std::uint32_t>(std::max(exponent, 1)) << 23;
    const float scale = greatest < 0x7f800000u ? bit_cast<float>(power) : std::numeric_limits<float>::quiet_NaN();
    const float factor = bit_cast<float>(0x7f000000u - power);  // 1 / scale
    for (std::int64_t i = 0; i < count; ++i) {
        const float value = rounded_to_fp8(to_float(x[i]) * factor) * scale;
        out[i] = from_float<Element>(std::clamp(value, -kLargest<Element>, kLargest<Element>));  // keeps NaN
    }
}

// Replaces the x of a call by a copy rounded to fp8_token, and returns the memory of the copy. The caller must keep the
// memory until the call has run.
template <typename Element>
std::unique_ptr<char[]> round_x(cpu::Forward& call, cpu::ParallelFor parallel_for) {
    std::unique_ptr<char[]> memory(new char[call.tokens * call.in_features * sizeof(Element)]);
    auto* const out = reinterpret_cast<Element*>(memory.get());
    const auto round_tokens = [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t token = begin; token < end; ++token)
            round_token(static_cast<const Element*>(call.x) + token * call.x_stride, out + token * call.in_features,
                        call.in_features);
    };
    const std::int64_t grain = 1 + (1 << 14) / (1 + call.in_features);
    if (cpu::over_ranges(parallel_for, call.tokens, grain, round_tokens) != cpu::Status::ok)
        throw std::runtime_error("mglu: the threads failed");
    call.x = memory.get();
    call.x_stride = call.in_features;
    return memory;
}

}  // namespace

cpu::DType cpu_dtype(const char* argument, Scalar dtype) {
    switch (dtype) {
        case Scalar::float32: return cpu::DType::float32;
        case Scalar::bfloat16: return cpu::DType::bfloat16;
        case Scalar::float16: return cpu::DType::float16;
        default:
            refuse_dtype(argument, dtype,
                         "which this library has no CPU kernel for; it has float16, bfloat16 and float32 (mglu_ops in "
                         "Python takes float64)");
    }
}

void forward_on_cpu(const LayerCall& call, const cpu::Experts* experts, const Tensor& out, const Executor& executor) {
    cpu::Forward p{};
    p.x = call.x.data;
    p.weight = call.weight.data;
    p.packed_masks = static_cast<const std::uint8_t*>(call.packed_masks.data);
    p.out = out.data;
    p.tokens = call.tokens;
    p.out_features = call.out_features;
    p.in_features = call.in_features;
    p.n_masks = call.n_masks;
    p.x_stride = call.x_row_stride;
    p.weight_stride = call.weight.strides[0];
    p.mask_stride = call.packed_masks.strides[0];
    p.out_stride = call.out_features;
    p.dtype = p.mask_weights_dtype = cpu_dtype("x", call.x.dtype);
    p.weight_format = call.format;
    if (call.weight_scale) p.weight_scale = call.weight_scale->data;
    p.activation = static_cast<cpu::Activation>(call.activation_code);
    p.isa = cpu::Isa::best;
    if (const auto& mask_weight = call.mask_weights) {
        p.mask_weights = mask_weight->data;
        p.mask_weight_stride = call.mask_weight_row_stride;
        p.mask_weight_mask_stride = mask_weight->last_stride();
        p.mask_weights_dtype = cpu_dtype("mask_weights", mask_weight->dtype);
    }
    std::unique_ptr<char[]> rounded;
    if (call.rounds_x) {
        const auto round = p.dtype == cpu::DType::float32    ? round_x<float>
                           : p.dtype == cpu::DType::bfloat16 ? round_x<BFloat16>
                                                             : round_x<Float16>;
        rounded = round(p, executor.parallel_for);
    }
    const cpu::Status status = experts != nullptr ? cpu::forward_experts(p, *experts, executor.parallel_for)
                                                  : cpu::forward(p, executor.parallel_for);
    if (status != cpu::Status::ok) throw std::runtime_error(std::string("mglu: ") + cpu::status_message(status));
}

void forward(const LayerCall& call, const Tensor& out, const Executor& executor) {
    if (out.elements() == 0) return;
    switch (call.x.device) {
        case Device::cpu: return forward_on_cpu(call, nullptr, out, executor);
        case Device::cuda: return cuda::forward(call, out.data, executor);
    }
    refuse("x: got device type " + std::to_string(static_cast<int>(call.x.device)) + ", must be a CPU or a CUDA GPU");
}

}  // namespace mglu
