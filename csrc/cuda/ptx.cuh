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

// What is read exactly once should be the first to leave L2: it would only push out x and other kernels' data. These are
// what ptxas makes of createpolicy.fractional with evict_first and evict_normal on 8.0, 8.9, 9.0, 10.0 and 12.0; from the
// instruction itself they would lie in a register and move to a uniform one at every copy.
__device__ __forceinline__ u64 cache_policy(bool read_once) {
    return read_once ? 0x12f0000000000000ull : 0x16f0000000000000ull;
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

// Into L2, and no further.
__device__ __forceinline__ void prefetch(const void* source) { asm volatile("prefetch.global.L2 [%0];" ::"l"(source)); }

__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most kPending of this thread's latest groups are still in flight.
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// --- barriers in shared memory: a phase ends when `count` threads have arrived ---

__device__ __forceinline__ void barrier_init(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("{\n\t.reg .b64 state;\n\tmbarrier.arrive.shared.b64 state, [%0];\n\t}" ::"r"(barrier) : "memory");
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define MGLU_TEST "test_wait"
#else
#define MGLU_TEST "try_wait"
#endif

// Waits for the end of the phase of this parity (0 for the first).
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    asm volatile("{\n\t.reg .pred done;\n\tagain:\n\tmbarrier." MGLU_TEST
                 ".parity.shared.b64 done, [%0], %1;\n\t@!done bra again;\n\t}" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
}

// --- the copy engine ---

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr bool kCopyEngine = false;
#else
constexpr bool kCopyEngine = true;
#endif

// What this thread wrote to shared memory is there for the copy engine and for wgmma, once others know of it: barriers,
// after barrier_init and before the block's first barrier.
__device__ __forceinline__ void shared_is_written() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Arrives, and lets the phase wait for as many bytes of bulk copies.
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// A contiguous piece of global memory, by the copy engine.
__device__ __forceinline__ void copy_bulk(u32 destination, const void* source, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     destination),
                 "l"(source), "r"(bytes), "r"(barrier)
                 : "memory");
}

// The same to the same place of each block of a cluster, whose barriers there each hear of it.
template <int kBlocks>
__device__ __forceinline__ void copy_bulk_to_cluster(u32 destination, const void* source, u32 bytes, u32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;" ::"r"(
            destination),
        "l"(source), "r"(bytes), "r"(barrier), "h"(static_cast<u16>((1 << kBlocks) - 1))
        : "memory");
}

// --- clusters: blocks that run at once and reach each other's shared memory ---

#if defined(MGLU_CLUSTER) && MGLU_CLUSTER > 1
#define MGLU_CLUSTERED __cluster_dims__(MGLU_CLUSTER, 1, 1)
#else
#define MGLU_CLUSTERED
#endif

__device__ __forceinline__ u32 rank_in_cluster() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Where a place in shared memory is in a block of the cluster, and a barrier there.
__device__ __forceinline__ u32 address_in_cluster(u32 address, u32 rank) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}
__device__ __forceinline__ void barrier_arrive_in_cluster(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Between the two, all threads of all blocks of a cluster have come, and barriers that were made before the first can be
// copied to after the second. No other memory is ordered: that would take a fence of the whole GPU.
__device__ __forceinline__ void arrive_in_cluster() {
    asm volatile("fence.mbarrier_init.release.cluster;\n\tbarrier.cluster.arrive.relaxed;" ::: "memory");
}
__device__ __forceinline__ void wait_for_cluster() { asm volatile("barrier.cluster.wait;" ::: "memory"); }

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

__device__ __forceinline__ void store_shared_16(u32 address, const Vec16& v) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.word[0]), "r"(v.word[1]), "r"(v.word[2]),
                 "r"(v.word[3])
                 : "memory");
}

// Four 8x8 matrices of 16-bit elements: lane l gives the address of 16 bytes, row l % 8 of matrix l / 8, and gets elements
// 2 (l % 4) and the next of row l / 4 of each.
__device__ __forceinline__ void load_matrices(u32 (&to)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
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

// D (16x8, float32) += A (16x32) B (32x8, column major), in float16 or bfloat16, where A has two values in each four columns.
// With g = lane / 4 and q = lane % 4 a thread holds, of A's values: a0 = those of (g, 4q..4q+3), a1 = (g+8, same columns),
// a2 = (g, columns + 16), a3 = (g+8, columns + 16); of B: b_n = (8n + 2q..8n + 2q+1, g); of D: (g, 2q), (g, 2q+1), (g+8, 2q),
// (g+8, 2q+1). `places`, of the threads q = 2 kPair and q = 2 kPair + 1 of each four, for the columns from 0 and from 16:
// four bits for each four columns, in the lower half of row g and in the upper half of row g+8; in which column the first
// value is (two bits), and in which the second.
template <bool kBfloat16, int kPair>
__device__ __forceinline__ void mma_sparse_16x8x32(float (&d)[4], const u32 (&a)[4], const u32 (&b)[4], u32 places) {
#define MGLU_MMA(type)                                                                                                  \
    asm volatile("mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32." type "." type                              \
                 ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9, %10, %11}, {%0, %1, %2, %3}, %12, %13;"               \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                       \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(places), \
                   "n"(kPair))
    if constexpr (kBfloat16)
        MGLU_MMA("bf16");
    else
        MGLU_MMA("f16");
#undef MGLU_MMA
}

// Transposes an 8x8 matrix of 16-bit elements: lane l holds elements 2 (l % 4) and the next of row l / 4.
__device__ __forceinline__ u32 transpose(u32 fragment) {
    u32 result;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(fragment));
    return result;
}

// Programmatic dependent launch (sm_90 and later): everything after the wait sees what the kernels before this one
// in the stream wrote. Without the launch attribute both are no-ops.
constexpr bool kDependentLaunch = kCopyEngine;  // which came with it

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
