// Runs calls of one layer on the driver that is loaded, for each number of tokens of the command line.
//
//   print_launches N_MASKS OUT_FEATURES IN_FEATURES WEIGHT_FORMAT ROUNDS_X TOKENS...
#include <cstdio>
#include <cstdlib>

#include "library/cuda/launch.h"
#include "library/formats.h"

namespace {

// The driver never reads memory at these addresses.
void* const kAddress = reinterpret_cast<void*>(0x1000);
void* const kScaleAddress = reinterpret_cast<void*>(0x2000);

void* allocate(std::int64_t bytes) {
    std::printf("allocate %ld\n", static_cast<long>(bytes));
    return kAddress;
}

mglu::Tensor tensor(const std::int64_t* sizes, const std::int64_t* strides, std::int64_t dims, mglu::Scalar dtype) {
    return {kAddress, dims, sizes, strides, dtype, mglu::Device::cuda, 0};
}

}  // namespace

int main(int count, char** arguments) {
    const std::int64_t n = std::atol(arguments[1]), d = std::atol(arguments[2]), h = std::atol(arguments[3]);
    const mglu::Format& format = mglu::kFormats[std::atol(arguments[4])];
    mglu::Executor executor;
    executor.allocate = allocate;
    for (int i = 6; i < count; ++i) {
        const std::int64_t tokens = std::atol(arguments[i]), stored = h / format.packed;
        const std::int64_t x_sizes[] = {tokens, h}, weight_sizes[] = {d, stored}, mask_sizes[] = {d, h / 8, n};
        const std::int64_t strides[] = {h, 1}, weight_strides[] = {stored, 1}, mask_strides[] = {h / 8 * n, n, 1};
        mglu::LayerCall call{};
        call.x = tensor(x_sizes, strides, 2, mglu::Scalar::float16);
        call.weight = tensor(weight_sizes, weight_strides, 2, format.dtype.value_or(mglu::Scalar::float16));
        call.packed_masks = tensor(mask_sizes, mask_strides, 3, mglu::Scalar::uint8);
        if (format.dtype) call.weight_scale.emplace().data = kScaleAddress;
        call.weight_format = format.code;
        call.rounds_x = std::atol(arguments[5]) != 0;
        call.tokens = tokens;
        call.out_features = d;
        call.in_features = h;
        call.n_masks = n;
        call.x_row_stride = h;
        std::printf("%ld tokens\n", static_cast<long>(tokens));
        mglu::cuda::forward(call, kAddress, executor);
    }
}
