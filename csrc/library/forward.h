// Runs mglu::forward on plain tensors, by the kernels for their device (csrc/cpu or csrc/cuda).
#pragma once

#include "executor.h"
#include "layer_call.h"

namespace mglu {

// `out` is contiguous, on x's device, in x's dtype, and has `call.result_sizes()`. No tensor may be in
// `needed_copies(call)`. Throws std::invalid_argument if the device has no kernel for the dtype, and std::runtime_error
// if a kernel fails.
void forward(const LayerCall& call, const Tensor& out, const Executor& executor);

}  // namespace mglu
