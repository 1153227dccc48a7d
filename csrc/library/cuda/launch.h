// Runs calls on a GPU, by plans whose kernels are in csrc/cuda.
#pragma once

#include "../executor.h"
#include "../experts.h"

namespace mglu::cuda {

// `out` is the address of the contiguous result, on the current device.
void forward(const LayerCall& call, void* out, const Executor& executor);
void forward(const ExpertsCall& call, void* out, const Executor& executor);

// All tensors of the call are contiguous, and y and the weight start at multiples of 16 bytes.
void experts_down(const DownCall& call, void* out, const Executor& executor);

}  // namespace mglu::cuda
