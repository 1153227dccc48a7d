#include "forward.h"

#include <stdexcept>
#include <string>

#include "cuda/launch.h"

namespace mglu {

namespace {

cpu::DType cpu_dtype(const char* argument, Scalar dtype) {
    switch (dtype) {
        case Scalar::float32: return cpu::DType::float32;
        case Scalar::bfloat16: return cpu::DType::bfloat16;
        case Scalar::float16: return cpu::DType::float16;
        default:
            refuse(std::string(argument) + ": got dtype " + name(dtype) +
                   ", which this library has no CPU kernel for; it "
                   "has float16, bfloat16 and float32 (mglu_ops in Python takes float64)");
    }
}

void forward_cpu(const LayerCall& call, const Tensor& out, const Executor& executor) {
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
    p.weight_format = call.weight_format;
    if (call.weight_scale) p.weight_scale = call.weight_scale->data;
    p.activation = static_cast<cpu::Activation>(call.activation);
    p.isa = cpu::Isa::best;
    if (const auto& mask_weight = call.mask_weights) {
        p.mask_weights = mask_weight->data;
        p.mask_weight_stride = call.mask_weight_row_stride;
        p.mask_weight_mask_stride = mask_weight->last_stride();
        p.mask_weights_dtype = cpu_dtype("mask_weights", mask_weight->dtype);
    }
    const cpu::Status status = cpu::forward(p, executor.parallel_for);
    if (status != cpu::Status::ok) throw std::runtime_error(std::string("mglu: ") + cpu::status_message(status));
}

}  // namespace

void forward(const LayerCall& call, const Tensor& out, const Executor& executor) {
    if (out.elements() == 0) return;
    switch (call.x.device) {
        case Device::cpu: return forward_cpu(call, out, executor);
        case Device::cuda: return cuda::forward(call, out.data, executor);
    }
    refuse("x: got device type " + std::to_string(static_cast<int>(call.x.device)) + ", must be a CPU or a CUDA GPU");
}

}  // namespace mglu
