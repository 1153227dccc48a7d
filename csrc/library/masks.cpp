#include "masks.h"

#include <stdexcept>
#include <string>

#include "../cpu/mglu_cpu.h"

namespace mglu {

namespace {

constexpr std::int64_t kMaxMasks = 16;

std::string text(std::int64_t number) { return std::to_string(number); }

std::int64_t packed_width(std::int64_t in_features) { return in_features / 8 + (in_features % 8 != 0); }

void raise_unless_ok(cpu::Status status) {
    if (status != cpu::Status::ok) throw std::runtime_error(std::string("mglu: ") + cpu::status_message(status));
}

// Copies masks, whose sizes and strides in elements are in `call`, to contiguous bytes of 0 and 1. Refuses other values.
// For 16-bit floats, Element is an integer type, `one` has the bits of 1.0, and `negative_zero` has the bits of -0.0.
template <typename Element>
void to_bytes(const cpu::Pack& call, const void* data, std::uint8_t* bytes, Element one, Element negative_zero = 0) {
    for (std::int64_t i = 0; i < call.n_masks; ++i)
        for (std::int64_t r = 0; r < call.out_features; ++r)
            for (std::int64_t k = 0; k < call.in_features; ++k) {
                const std::int64_t at = i * call.mask_stride + r * call.row_stride + k * call.column_stride;
                const Element value = static_cast<const Element*>(data)[at];
                if (value != one && value != Element{0} && value != negative_zero)
                    refuse("masks: a value is neither 0 nor 1; for real-valued logits, pack `logits > 0`");
                *bytes++ = value == one;
            }
}

void to_bytes(const cpu::Pack& call, const Tensor& masks, std::uint8_t* bytes) {
    switch (masks.dtype) {
        case Scalar::uint8: return to_bytes<std::uint8_t>(call, masks.data, bytes, 1);
        case Scalar::int8: return to_bytes<std::int8_t>(call, masks.data, bytes, 1);
        case Scalar::int16: return to_bytes<std::int16_t>(call, masks.data, bytes, 1);
        case Scalar::int32: return to_bytes<std::int32_t>(call, masks.data, bytes, 1);
        case Scalar::int64: return to_bytes<std::int64_t>(call, masks.data, bytes, 1);
        case Scalar::float16: return to_bytes<std::uint16_t>(call, masks.data, bytes, 0x3C00, 0x8000);
        case Scalar::bfloat16: return to_bytes<std::uint16_t>(call, masks.data, bytes, 0x3F80, 0x8000);
        case Scalar::float32: return to_bytes<float>(call, masks.data, bytes, 1);
        case Scalar::float64: return to_bytes<double>(call, masks.data, bytes, 1);
        default: refuse("masks: must be bool, or integer or real with values 0 and 1");
    }
}

}  // namespace

void check_masks(const Tensor& masks) {
    if (masks.dims != 2 && masks.dims != 3)
        refuse("masks: got shape " + masks.shape() +
               ", must be [n_masks, out_features, in_features] or [out_features, "
               "in_features]");
    if (masks.dims == 3 && (masks.sizes[0] < 1 || masks.sizes[0] > kMaxMasks))
        refuse("masks: got n_masks=" + text(masks.sizes[0]) + ", must be 1 to 16");
    if (masks.device != Device::cpu)
        refuse("masks: got device " + masks.device_name() + "; this library packs on the CPU");
}

std::vector<std::int64_t> packed_sizes(const Tensor& masks) {
    const std::int64_t* sizes = masks.sizes + (masks.dims == 3 ? 1 : 0);
    return {sizes[0], packed_width(sizes[1]), masks.dims == 3 ? masks.sizes[0] : 1};
}

void pack_masks(const Tensor& masks, const Tensor& out, const Executor& executor) {
    if (out.elements() == 0) return;
    const bool three = masks.dims == 3;
    cpu::Pack call{};
    call.packed_masks = static_cast<std::uint8_t*>(out.data);
    call.n_masks = three ? masks.sizes[0] : 1;
    call.out_features = out.sizes[0];
    call.in_features = masks.last_size();
    call.masks = static_cast<const std::uint8_t*>(masks.data);
    call.mask_stride = three ? masks.strides[0] : 0;
    call.row_stride = masks.strides[masks.dims - 2];
    call.column_stride = masks.last_stride();
    std::vector<std::uint8_t> bytes;
    if (masks.dtype != Scalar::boolean) {
        bytes.resize(static_cast<std::size_t>(masks.elements()));
        to_bytes(call, masks, bytes.data());
        call.masks = bytes.data();
        call.mask_stride = call.out_features * call.in_features;
        call.row_stride = call.in_features;
        call.column_stride = 1;
    }
    raise_unless_ok(cpu::pack_masks(call, executor.parallel_for));
}

void check_packed(const Tensor& packed_masks, std::int64_t in_features) {
    if (packed_masks.dtype != Scalar::uint8)
        refuse_dtype("packed_masks", packed_masks.dtype, "must be uint8; pack masks with mglu::pack_masks");
    if (in_features < 0) refuse("in_features: got " + text(in_features) + ", must be at least 0");
    if (packed_masks.dims != 3 || packed_masks.sizes[1] != packed_width(in_features))
        refuse("packed_masks: got shape " + packed_masks.shape() + ", must be [out_features, " +
               text(packed_width(in_features)) + ", n_masks] for in_features=" + text(in_features));
    if (packed_masks.sizes[2] < 1 || packed_masks.sizes[2] > kMaxMasks)
        refuse("packed_masks: got n_masks=" + text(packed_masks.sizes[2]) + ", must be 1 to 16");
}

void unpack_masks(const Tensor& packed_masks, std::int64_t in_features, const Tensor& out, const Executor& executor) {
    if (packed_masks.device != Device::cpu)
        refuse("packed_masks: got device " + packed_masks.device_name() + "; this library unpacks on the CPU");
    if (out.elements() == 0) return;
    cpu::Unpack call{};
    call.packed_masks = static_cast<const std::uint8_t*>(packed_masks.data);
    call.masks = static_cast<std::uint8_t*>(out.data);
    call.n_masks = packed_masks.sizes[2];
    call.out_features = packed_masks.sizes[0];
    call.in_features = in_features;
    call.row_stride = packed_masks.strides[0];
    call.octet_stride = packed_masks.strides[1];
    call.mask_stride = packed_masks.strides[2];
    raise_unless_ok(cpu::unpack_masks(call, executor.parallel_for));
}

}  // namespace mglu
