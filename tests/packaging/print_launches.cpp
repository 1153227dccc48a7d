// Runs calls of one layer on the driver that is loaded, for each number of tokens of the command line.
//
//   print_launches N_MASKS OUT_FEATURES IN_FEATURES TOKENS...
#include <cstdio>
#include <cstdlib>

#include "library/cuda/launch.h"

namespace {

// The driver never reads memory at these addresses.
void* const kAddress = reinterpret_cast<void*>(0x1000);

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
    mglu::Executor executor;
    executor.allocate = allocate;
    for (int i = 4; i < count; ++i) {
        const std::int64_t tokens = std::atol(arguments[i]);
        const std::int64_t x_sizes[] = {tokens, h}, weight_sizes[] = {d, h}, mask_sizes[] = {d, h / 8, n};
        const std::int64_t strides[] = {h, 1}, mask_strides[] = {h / 8 * n, n, 1};
        const mglu::LayerCall call{tensor(x_sizes, strides, 2, mglu::Scalar::float16),
                                   tensor(weight_sizes, strides, 2, mglu::Scalar::float16),
                                   tensor(mask_sizes, mask_strides, 3, mglu::Scalar::uint8),
                                   {},
                                   0,
                                   tokens,
                                   d,
                                   h,
                                   n,
                                   h,
                                   0};
        std::printf("%ld tokens\n", static_cast<long>(tokens));
        mglu::cuda::forward(call, kAddress, executor);
    }
}
