// Runs mglu::forward on plain tensors, by the kernels for their device (csrc/cpu or csrc/cuda).
#pragma once

#include "../cpu/mglu_cpu.h"
#include "executor.h"
#include "layer_call.h"

namespace mglu {

// Returns the CPU kernels' name for the dtype of an argument. Throws std::invalid_argument if they do not take it.
cpu::DType cpu_dtype(const char* argument, Scalar dtype);

// `out` is contiguous, on x's device, in x's dtype, and has `call.result_sizes()`. No tensor may be in
// `needed_copies(call)`. Throws std::invalid_argument if the device has no kernel for the dtype, and std::runtime_error
// if a kernel fails.
void forward(const LayerCall& call, const Tensor& out, const Executor& executor);

// Runs a layer on a CPU, or if `experts` is not null the layers of experts, of which `call` describes the first.
void forward_on_cpu(const LayerCall& call, const cpu::Experts* experts, const Tensor& out, const Executor& executor);

}  // namespace mglu
