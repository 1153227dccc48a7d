// The functions of csrc/cuda/ptx.cuh that the kernels of a training step use, for a C++ compiler, with CUDA's names.
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
    float value[32];
};
inline Warp* warp;

inline float __shfl_xor_sync(unsigned, float value, int distance) {
    const unsigned lane = threadIdx.x % 32;
    warp->value[lane] = value;
    warp->barrier.arrive_and_wait();
    const float found = warp->value[lane ^ distance];
    warp->barrier.arrive_and_wait();
    return found;
}
#endif

namespace mglu {

inline int min(int a, int b) { return a < b ? a : b; }

// A GPU would end a program with an unaligned access.
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
