// mglu::forward on plain tensors: the call runs on the kernels of its device, csrc/cpu or csrc/cuda.
#pragma once

#include "executor.h"
#include "layer_call.h"

namespace mglu {

// `out` is contiguous, on x's device and in x's dtype, and has `call.result_sizes()`. No tensor of the call may need a
// copy (`needed_copies`). Throws std::invalid_argument if the device has no kernel for the dtype, std::runtime_error if
// a kernel fails.
void forward(const LayerCall& call, const Tensor& out, const Executor& executor);

}  // namespace mglu
