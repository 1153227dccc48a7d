// The few PTX instructions the kernels are made of, one wrapper each. No header is included anywhere in this
// folder, so that NVRTC compiles it without a CUDA toolkit on the machine.
#pragma once

namespace mglu {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

// 128 bits that move as one instruction.
struct alignas(16) Vec16 {
    u32 word[4];
};

// Shared-memory instructions take a 32-bit address inside the shared window.
__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// What is read exactly once should be the first to leave L2: it would only push out x and other kernels' data.
__device__ __forceinline__ u64 cache_policy(bool read_once) {
    u64 policy;
    if (read_once)
        asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    else
        asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// Global to shared without passing through registers. The bytes from `valid` up to kBytes arrive as zeros, and
// nothing is read when `valid` is 0, so a ragged end needs no branch. 16 bytes bypass L1 (.cg); smaller ones cannot.
template <int kBytes>
__device__ __forceinline__ void copy_async(u32 destination, const void* source, u32 valid, u64 policy) {
    static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16, "the sizes cp.async knows");
    if constexpr (kBytes == 16) {
        asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(destination),
                     "l"(source), "r"(valid), "l"(policy)
                     : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global.L2::cache_hint [%0], [%1], %2, %3, %4;" ::"r"(destination),
                     "l"(source), "n"(kBytes), "r"(valid), "l"(policy)
                     : "memory");
    }
}

__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most kPending of this thread's latest groups are still in flight.
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ Vec16 load_shared_16(u32 address) {
    Vec16 v;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
                 : "r"(address)
                 : "memory");
    return v;
}

template <int kWords>
__device__ __forceinline__ void load_shared_words(u32 (&to)[kWords], u32 address) {
    static_assert(kWords == 1 || kWords == 2 || kWords % 4 == 0, "one load or several of 16 bytes");
    if constexpr (kWords == 2) {
        asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "r"(address) : "memory");
    } else if constexpr (kWords == 1) {
        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(to[0]) : "r"(address) : "memory");
    } else {
#pragma unroll
        for (int w = 0; w < kWords; w += 4) {
            const Vec16 v = load_shared_16(address + 4 * w);
            to[w] = v.word[0], to[w + 1] = v.word[1], to[w + 2] = v.word[2], to[w + 3] = v.word[3];
        }
    }
}

__device__ __forceinline__ u32 load_shared_4(u32 address) {
    u32 v;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
    return v;
}

// Keeps a value in its register: without this ptxas recomputes addresses from the parameters at every stage.
template <typename T>
__device__ __forceinline__ void keep(T& value) {
    if constexpr (sizeof(T) == 8) asm volatile("" : "+l"(value));
    else asm volatile("" : "+r"(value));
}

// The four bytes that `selector` names (one hex digit each, lowest first; 0-3 from low, 4-7 from high).
template <u32 kSelector>
__device__ __forceinline__ u32 pick_bytes(u32 low, u32 high) {
    return __byte_perm(low, high, kSelector);
}

// (w & 0x80008000) ^ v in one LOP3: flips the signs of two packed 16-bit floats.
__device__ __forceinline__ u32 flip_signs(u32 value, u32 bits) { return value ^ (bits & 0x80008000u); }

// D (16x8, float32) += A (16x16, row major) B (16x8, column major), A and B in float16 or bfloat16.
// With g = lane / 4 and q = lane % 4 a thread holds, of A: a0 = (g, 2q..2q+1), a1 = (g+8, same k), a2 = (g, k+8),
// a3 = (g+8, k+8); of B: b0 = (2q..2q+1, g), b1 = (k+8, g); of D: (g, 2q), (g, 2q+1), (g+8, 2q), (g+8, 2q+1).
template <bool kBfloat16>
__device__ __forceinline__ void mma_16x8x16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    if constexpr (kBfloat16) {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                     "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    } else {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                     "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    }
}

// Transposes an 8x8 matrix of 16-bit elements: lane l holds elements 2 (l % 4) and the next of row l / 4.
__device__ __forceinline__ u32 transpose(u32 fragment) {
    u32 result;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(fragment));
    return result;
}

// Programmatic dependent launch (sm_90 and later): everything after the wait sees what the kernels before this one
// in the stream wrote. Without the launch attribute both are no-ops.
__device__ __forceinline__ void wait_for_earlier_kernels() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void let_next_kernel_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace mglu
