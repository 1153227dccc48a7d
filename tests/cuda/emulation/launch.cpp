// Runs the kernel KERNEL of KERNEL_SOURCE on a CPU, one thread after the other. With LANES_AT_ONCE, for kernels that
// shuffle, the 32 lanes of a warp run at once, in threads.
#include KERNEL_SOURCE

#ifdef LANES_AT_ONCE
#include <thread>
#include <vector>
#endif

template <class Params>
void run_block(void (*kernel)(Params), const Params& params, unsigned block) {
    for (unsigned first = 0; first < mglu::kThreads; first += 32) {
        const auto run_lane = [&](unsigned lane) {
            blockIdx.x = block;
            threadIdx.x = first + lane;
            kernel(params);
        };
#ifdef LANES_AT_ONCE
        Warp lanes;
        warp = &lanes;
        std::vector<std::thread> threads;
        for (unsigned lane = 0; lane < 32; ++lane) threads.emplace_back(run_lane, lane);
        for (std::thread& thread : threads) thread.join();
#else
        for (unsigned lane = 0; lane < 32; ++lane) run_lane(lane);
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
