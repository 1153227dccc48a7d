// Chooses and launches a kernel of csrc/cuda from C++.
#pragma once

#include "../executor.h"
#include "../layer_call.h"

namespace mglu::cuda {

// `out` is the address of the contiguous result, on the current device.
void forward(const LayerCall& call, void* out, const Executor& executor);

}  // namespace mglu::cuda
