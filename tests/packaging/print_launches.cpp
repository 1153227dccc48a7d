// Runs a call of one layer on the fake driver for each number of tokens of the command line.
//
//   print_launches N_MASKS OUT_FEATURES IN_FEATURES WEIGHT_FORMAT ROUNDS_X DTYPE WEIGHTS_DTYPE EXPERTS TOP_K ID_DTYPE
//                  TOKENS...
//
// EXPERTS is 0 for a layer without experts, and TOP_K is 0 if rows are sorted by expert. If N_MASKS is 0, the calls are
// of mglu::experts_down. WEIGHTS_DTYPE is the dtype of the mask weights or expert weights; -1 for none. Dtypes are
// torch's numbers.
#include <cstdio>
#include <cstdlib>

#include "library/cuda/launch.h"
#include "library/formats.h"

namespace {

using mglu::Scalar;

// The driver never reads memory at these addresses.
void* address(int number) { return reinterpret_cast<void*>(0x1000L * number); }
void* const kResult = address(7);

void* allocate(std::int64_t bytes) {
    std::printf("allocate %ld\n", static_cast<long>(bytes));
    return address(0x100);
}

mglu::Tensor tensor(int number, const std::int64_t* sizes, const std::int64_t* strides, std::int64_t dims,
                    Scalar dtype) {
    return {address(number), dims, sizes, strides, dtype, mglu::Device::cuda, 0};
}

}  // namespace

int main(int count, char** arguments) {
    const auto number = [&](int i) { return std::atol(arguments[i]); };
    const std::int64_t n = number(1), d = number(2), h = number(3), experts = number(8), top_k = number(9);
    const mglu::Format& format = mglu::kFormats[number(4)];
    const auto dtype = static_cast<Scalar>(number(6)), weights_dtype = static_cast<Scalar>(number(7));
    const auto id_dtype = static_cast<Scalar>(number(10));
    mglu::Executor executor;
    executor.allocate = allocate;
    for (int i = 11; i < count; ++i) {
        const std::int64_t tokens = number(i), stored = h / format.packed, shared = top_k > 0 ? top_k : 1;
        const std::int64_t width = (h + 7) / 8;
        std::int64_t scales = 1;  // the number of scales of an expert
        for (const std::int64_t size : format.scale_sizes(d, h)) scales *= size;
        const std::int64_t x_sizes[] = {tokens, h}, x_strides[] = {h, 1};
        const std::int64_t weight_sizes[] = {experts, d, stored}, weight_strides[] = {d * stored, stored, 1};
        const std::int64_t mask_sizes[] = {d, width, n}, mask_strides[] = {width * n, n, 1};
        const std::int64_t weights_sizes[] = {tokens, shared, n}, weights_strides[] = {shared * n, n, 1};
        const std::int64_t scale_sizes[] = {experts, scales}, scale_strides[] = {scales, 1};
        const std::int64_t pair_sizes[] = {tokens, shared, h}, pair_strides[] = {shared * h, h, 1};
        const Scalar stored_dtype = format.dtype.value_or(dtype);
        std::printf("%ld tokens\n", static_cast<long>(tokens));
        if (n == 0) {
            mglu::DownCall call{tensor(1, pair_sizes, pair_strides, 3, dtype),
                                tensor(2, weight_sizes, weight_strides, 3, stored_dtype),
                                tensor(6, pair_sizes, pair_strides, 2, id_dtype),
                                tensor(4, pair_sizes, pair_strides, 2, weights_dtype),
                                {},
                                format.code};
            if (format.dtype) call.weight_scale = tensor(5, scale_sizes, scale_strides, 2, format.scale_dtype);
            mglu::cuda::experts_down(call, kResult, executor);
            continue;
        }
        mglu::LayerCall layer{};
        layer.x = tensor(1, x_sizes, x_strides, 2, dtype);
        layer.weight = tensor(2, weight_sizes + 1, weight_strides + 1, 2, stored_dtype);
        layer.packed_masks = tensor(3, mask_sizes, mask_strides, 3, Scalar::uint8);
        if (number(7) >= 0) {
            layer.mask_weights = tensor(4, weights_sizes, weights_strides, 3, weights_dtype);
            layer.mask_weight_row_stride = n;
        }
        if (format.dtype) layer.weight_scale = tensor(5, scale_sizes + 1, scale_strides + 1, 1, format.scale_dtype);
        layer.format = format.code;
        layer.rounds_x = number(5) != 0;
        layer.activation_code = static_cast<int>(mglu::cpu::Activation::silu);
        layer.tokens = tokens;
        layer.out_features = d;
        layer.in_features = h;
        layer.n_masks = n;
        layer.x_row_stride = h;
        if (experts == 0) {
            mglu::cuda::forward(layer, kResult, executor);
            continue;
        }
        mglu::ExpertsCall call{};
        call.layer = layer;
        call.routing = tensor(6, pair_sizes, pair_strides, top_k > 0 ? 2 : 1, id_dtype);
        call.is_sorted = top_k == 0;
        call.experts = experts;
        call.rows = tokens * shared;
        call.top_k = shared;
        call.weight_stride = d * stored;
        call.masks_stride = d * width * n;
        call.scale_stride = format.dtype ? scales : 0;
        mglu::cuda::forward(call, kResult, executor);
    }
}
