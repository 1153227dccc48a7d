// The kernels of csrc/cuda from C++: through the driver, which is opened at the first call, so that the library is built
// and loaded on machines without a GPU.
#pragma once

#include "../layer.h"

namespace mglu::cuda {

// A checked call, folded to two dimensions; the layer's strides hold but for those given here.
struct Call {
    const Layer* layer;
    std::int64_t tokens;
    std::int64_t x_row_stride;
    std::int64_t route_row_stride;
    int activation;
    void* out;
    const Executor* executor;
};

void forward(const Call& call);

}  // namespace mglu::cuda
