// Replaces csrc/cuda/ptx.cuh for a C++ compiler: the functions that emulated kernels use, and CUDA's built-in names.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#ifdef LANES_AT_ONCE
#include <barrier>
#endif

#include "types.cuh"

#define __device__
#define __global__
#define __shared__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)

struct Index {
    unsigned x;
};
inline thread_local Index blockIdx, threadIdx;

#ifdef LANES_AT_ONCE
// A warp in which each lane runs in its own thread.
struct Warp {
    std::barrier<> barrier{32};
    float number[32];
    unsigned word[32];
};
inline thread_local Warp* warp;

inline void __syncwarp() { warp->barrier.arrive_and_wait(); }

template <class T>
T of_lane(T (&values)[32], T value, unsigned source) {
    values[threadIdx.x % 32] = value;
    __syncwarp();
    const T found = values[source];
    __syncwarp();
    return found;
}
inline float __shfl_xor_sync(unsigned, float value, int distance) {
    return of_lane(warp->number, value, threadIdx.x % 32 ^ distance);
}
inline int __shfl_up_sync(unsigned, int value, unsigned distance) {
    const unsigned lane = threadIdx.x % 32;
    return of_lane<unsigned>(warp->word, value, lane < distance ? lane : lane - distance);
}
inline unsigned __ballot_sync(unsigned, bool set) {
    warp->word[threadIdx.x % 32] = set;
    __syncwarp();
    unsigned lanes = 0;
    for (int lane = 0; lane < 32; ++lane) lanes |= warp->word[lane] << lane;
    __syncwarp();
    return lanes;
}
#endif

#ifdef WARPS_AT_ONCE
inline std::barrier<>* block;
inline void __syncthreads() { block->arrive_and_wait(); }
inline int atomicAdd(int* to, int value) { return __atomic_fetch_add(to, value, __ATOMIC_RELAXED); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
#endif

namespace mglu {

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a < b ? b : a; }
inline void wait_for_earlier_kernels() {}
inline void let_next_kernel_start() {}

// Ends the program at an unaligned access, as a GPU does.
template <int kWords>
void check_alignment(const void* pointer) {
    if (reinterpret_cast<std::uintptr_t>(pointer) % (4 * kWords) != 0) {
        std::fprintf(stderr, "an access of %d bytes at %p\n", 4 * kWords, pointer);
        std::abort();
    }
}

template <int kWords>
void load_global(u32 (&to)[kWords], const void* source) {
    check_alignment<kWords>(source);
    std::memcpy(to, source, sizeof(to));
}
template <int kWords>
void store_global(void* destination, const u32 (&from)[kWords]) {
    check_alignment<kWords>(destination);
    std::memcpy(destination, from, sizeof(from));
}

inline float exp2_approximate(float x) { return std::exp2(x); }
inline float reciprocal_approximate(float x) { return 1.0f / x; }
inline u32 flip_signs(u32 value, u32 bits) { return value ^ (bits & 0x80008000u); }

}  // namespace mglu
