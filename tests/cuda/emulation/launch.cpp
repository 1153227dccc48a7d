// Runs the kernel KERNEL of KERNEL_SOURCE on a CPU, one CUDA thread after the other. With LANES_AT_ONCE, the 32 lanes
// of a warp run at the same time in threads of the CPU, for kernels that shuffle. With WARPS_AT_ONCE too, all threads
// of a block run at the same time, for kernels that call __syncthreads.
#include KERNEL_SOURCE

#ifdef LANES_AT_ONCE
#include <thread>
#include <vector>
#endif

#ifdef WARPS_AT_ONCE
constexpr unsigned kAtOnce = mglu::kThreads;
int shared[1 << 16];
#else
constexpr unsigned kAtOnce = 32;
#endif

template <class Params>
void run_block(void (*kernel)(Params), const Params& params, unsigned number) {
    for (unsigned first = 0; first < mglu::kThreads; first += kAtOnce) {
        const auto run_thread = [&](unsigned thread) {
            blockIdx.x = number;
            threadIdx.x = thread;
            kernel(params);
        };
#ifdef LANES_AT_ONCE
        std::vector<Warp> warps(kAtOnce / 32);
#ifdef WARPS_AT_ONCE
        std::barrier<> all(kAtOnce);
        block = &all;
#endif
        std::vector<std::thread> threads;
        for (unsigned i = 0; i < kAtOnce; ++i)
            threads.emplace_back([&, i] {
                warp = &warps[i / 32];
                run_thread(first + i);
            });
        for (std::thread& thread : threads) thread.join();
#else
        for (unsigned i = 0; i < kAtOnce; ++i) run_thread(first + i);
#endif
    }
}

template <class Params>
bool run(void (*kernel)(Params), const void* bytes, unsigned long size, unsigned blocks) {
    if (size != sizeof(Params)) return false;
    Params params;
    std::memcpy(&params, bytes, size);
    for (unsigned block = 0; block < blocks; ++block) run_block(kernel, params, block);
    return true;
}

// Returns false if the kernel's parameter does not have `size` bytes.
extern "C" bool launch(const void* bytes, unsigned long size, unsigned blocks) {
    return run(KERNEL, bytes, size, blocks);
}
