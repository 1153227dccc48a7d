// Where a call runs: on the threads of a pool, or on a stream of a GPU.
#pragma once

#include <cstdint>
#include <functional>

#include "../cpu/mglu_cpu.h"

namespace mglu {

struct Executor {
    cpu::ParallelFor parallel_for = nullptr;  // runs loops on the threads of torch, or on any other pool
    void* stream = nullptr;                   // CUstream
    // Allocates GPU memory, aligned to 16 bytes, for the kernels that are launched next on the stream. The next call of
    // `allocate` may free it.
    std::function<void*(std::int64_t bytes)> allocate = nullptr;
};

}  // namespace mglu
