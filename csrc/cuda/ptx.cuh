// Wrappers of PTX instructions, one function each. No file in this folder includes a header from outside the folder, so
// that NVRTC compiles the kernels on a machine without a CUDA toolkit.
#pragma once
#include "types.cuh"

namespace mglu {

// 128 bits that one instruction loads or stores.
struct alignas(16) Vec16 {
    u32 word[4];
};

// Shared-memory instructions take a 32-bit address inside the shared window.
__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// The L2 cache policy of a copy. Data that is read exactly once should be evicted first, so that it does not push out x
// and other kernels' data.
//
// The constants are what ptxas encodes for createpolicy.fractional with evict_first and evict_normal on sm_80, 89, 90,
// 100 and 120. The instruction itself would put the policy in a register, which each copy would move to a uniform
// register: 10 of the 180 instructions of a stage.
__device__ __forceinline__ u64 cache_policy(bool read_once) {
    return read_once ? 0x12f0000000000000ull : 0x16f0000000000000ull;
}

// Copies kBytes from global to shared memory asynchronously. The bytes from `valid` on arrive as zeros, and with
// `valid` 0 nothing is read, so that the end of a row needs no branch. Copies of 16 bytes bypass L1 (.cg); smaller ones
// cannot.
template <int kBytes>
__device__ __forceinline__ void copy_async(u32 destination, const void* source, u32 valid, u64 policy) {
    static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16, "the sizes cp.async knows");
    if constexpr (kBytes == 16) {
        asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(destination), "l"(source),
                     "r"(valid), "l"(policy)
                     : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global.L2::cache_hint [%0], [%1], %2, %3, %4;" ::"r"(destination), "l"(source),
                     "n"(kBytes), "r"(valid), "l"(policy)
                     : "memory");
    }
}

// Loads and stores 8 or 16 bytes of global memory in one instruction. Loaded data is not kept in L1.
template <int kWords>
__device__ __forceinline__ void load_global(u32 (&to)[kWords], const void* source) {
    static_assert(kWords == 2 || kWords == 4, "8 or 16 bytes");
    if constexpr (kWords == 2) {
        asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
                     : "=r"(to[0]), "=r"(to[1])
                     : "l"(source)
                     : "memory");
    } else {
        asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                     : "l"(source)
                     : "memory");
    }
}
template <int kWords>
__device__ __forceinline__ void store_global(void* destination, const u32 (&from)[kWords]) {
    static_assert(kWords == 2 || kWords == 4, "8 or 16 bytes");
    if constexpr (kWords == 2) {
        asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(destination), "r"(from[0]), "r"(from[1]) : "memory");
    } else {
        asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(destination), "r"(from[0]), "r"(from[1]),
                     "r"(from[2]), "r"(from[3])
                     : "memory");
    }
}

// Prefetches a cache line into L2.
__device__ __forceinline__ void prefetch(const void* source) { asm volatile("prefetch.global.L2 [%0];" ::"l"(source)); }

__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most kPending of this thread's commit groups are in flight.
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// --- mbarriers in shared memory: a phase ends when `count` threads have arrived ---

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

// Waits for the end of the phase with this parity (0 for the first phase).
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    asm volatile("{\n\t.reg .pred done;\n\tagain:\n\tmbarrier." MGLU_TEST
                 ".parity.shared.b64 done, [%0], %1;\n\t@!done bra again;\n\t}" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
}

// --- bulk copies by the TMA unit (sm_90 and later) ---

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr bool kHasTma = false;
#else
constexpr bool kHasTma = true;
#endif

// Makes this thread's writes to shared memory visible to the TMA unit and to wgmma (the async proxy). Call it after
// barrier_init and before the block's first barrier.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Arrives, and makes the phase end only when `bytes` bytes of bulk copies have arrived too.
__device__ __forceinline__ void barrier_arrive_expect_bytes(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Copies contiguous bytes from global to shared memory.
__device__ __forceinline__ void bulk_copy(u32 destination, const void* source, u32 bytes, u32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(destination),
        "l"(source), "r"(bytes), "r"(barrier)
        : "memory");
}

// Copies to every block of a cluster. `destination` and `barrier` stand for the same offsets in each block's shared
// memory.
template <int kBlocks>
__device__ __forceinline__ void bulk_copy_multicast(u32 destination, const void* source, u32 bytes, u32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], "
        "%4;" ::"r"(destination),
        "l"(source), "r"(bytes), "r"(barrier), "h"(static_cast<u16>((1 << kBlocks) - 1))
        : "memory");
}

// --- clusters: blocks that run at the same time and can access each other's shared memory ---

#if defined(MGLU_CLUSTER) && MGLU_CLUSTER > 1
#define MGLU_CLUSTER_DIMS __cluster_dims__(MGLU_CLUSTER, 1, 1)
#else
#define MGLU_CLUSTER_DIMS
#endif

__device__ __forceinline__ u32 rank_in_cluster() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Returns the address of the same offset in the shared memory of block `rank` of the cluster.
__device__ __forceinline__ u32 address_in_cluster(u32 address, u32 rank) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}
// Arrives at a barrier of any block of the cluster. `barrier` is a result of address_in_cluster.
__device__ __forceinline__ void barrier_arrive_in_cluster(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// A barrier of all blocks of a cluster, in two halves. When the wait ends, every thread of every block has arrived, and
// blocks may signal mbarriers that other blocks initialised before they arrived. Other memory accesses are not ordered,
// since that would take a fence for the whole GPU.
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
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.word[0]), "r"(v.word[1]),
                 "r"(v.word[2]), "r"(v.word[3])
                 : "memory");
}

// Loads four 8x8 matrices of 16-bit elements. Lane l passes the address of 16 bytes, row l % 8 of matrix l / 8; it
// receives elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4 of each matrix.
__device__ __forceinline__ void load_matrices(u32 (&to)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
}

// Like load_matrices(), but each matrix is transposed: the lane receives elements (2 (l % 4), l / 4) and (2 (l % 4) +
// 1, l / 4).
__device__ __forceinline__ void load_transposed_matrices(u32 (&to)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ u32 load_shared_4(u32 address) {
    u32 v;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
    return v;
}

// Reads a number of 32, 16 or 8 bits.
template <int kBits>
__device__ __forceinline__ u32 load_shared_bits(u32 address) {
    if constexpr (kBits == 32) return load_shared_4(address);
    u32 v;
    if constexpr (kBits == 16)
        asm volatile("{\n\t.reg .u16 v;\n\tld.shared.u16 v, [%1];\n\tcvt.u32.u16 %0, v;\n\t}"
                     : "=r"(v)
                     : "r"(address)
                     : "memory");
    else asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
    return v;
}

// Makes a value opaque to the compiler, so that it stays in its register. Otherwise ptxas recomputes addresses from the
// kernel's parameters (70 instructions in each stage).
template <typename T>
__device__ __forceinline__ void keep_in_register(T& value) {
    if constexpr (sizeof(T) == 8) asm volatile("" : "+l"(value));
    else asm volatile("" : "+r"(value));
}

// These functions compute 2^x and 1 / x in one instruction each, with a relative error of at most 2^-22. Subnormal
// operands and results become 0.
__device__ __forceinline__ float exp2_approximate(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}
__device__ __forceinline__ float reciprocal_approximate(float x) {
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

// Selects four of eight bytes: each hex digit of the selector, lowest first, is 0 to 3 for a byte of `low` and 4 to 7
// for a byte of `high`.
template <u32 kSelector>
__device__ __forceinline__ u32 pick_bytes(u32 low, u32 high) {
    return __byte_perm(low, high, kSelector);
}

// Flips signs of two packed 16-bit floats in one LOP3: of the lower float if bit 15 of `bits` is set, and of the upper
// float if bit 31 is set.
__device__ __forceinline__ u32 flip_signs(u32 value, u32 bits) { return value ^ (bits & 0x80008000u); }

// Sparse MMA: D (16x8, float32) += A (16x32) B (32x8, column major) in float16 or bfloat16. A has two values in every
// four columns. With g = lane / 4 and q = lane % 4, a thread holds
//
// - A's values: a0 = row g, columns 4q to 4q + 3; a1 = the same columns of row g + 8; a2 and a3 = rows g and g + 8,
//   16 columns further;
// - B: b_n = rows 8n + 2q and 8n + 2q + 1 of column g;
// - D: (g, 2q), (g, 2q + 1), (g + 8, 2q), (g + 8, 2q + 1).
//
// Of every four threads, thread q = 2 kSelector supplies the metadata of columns 0 to 15, and thread q = 2 kSelector +
// 1 supplies that of columns 16 to 31. The lower half of the word belongs to row g, and the upper half belongs to row g
// + 8. Every four columns have four bits: the lower two are the column of the first value, and the upper two are the
// column of the second value.
template <bool kBfloat16, int kSelector>
__device__ __forceinline__ void mma_sparse_16x8x32(float (&d)[4], const u32 (&a)[4], const u32 (&b)[4], u32 metadata) {
#define MGLU_MMA(type)                                                                                      \
    asm volatile("mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32." type "." type                \
                 ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9, %10, %11}, {%0, %1, %2, %3}, %12, %13;" \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                           \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]),  \
                   "r"(metadata), "n"(kSelector))
    if constexpr (kBfloat16) MGLU_MMA("bf16");
    else MGLU_MMA("f16");
#undef MGLU_MMA
}

// D (16x8, float32) += A (16x16) B (16x8, column major) in float16 or bfloat16. With g = lane / 4 and q = lane % 4, a
// thread holds
//
// - A: a0 = row g, columns 2q and 2q + 1; a1 = the same columns of row g + 8; a2 and a3 = rows g and g + 8, 8 columns
//   further;
// - B: b0 = rows 2q and 2q + 1 of column g; b1 = rows 2q + 8 and 2q + 9 of column g;
// - D: the same elements as in mma_sparse_16x8x32().
template <bool kBfloat16>
__device__ __forceinline__ void mma_16x8x16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
#define MGLU_MMA(type)                                                                  \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                 \
                 ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                       \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
    if constexpr (kBfloat16) MGLU_MMA("bf16");
    else MGLU_MMA("f16");
#undef MGLU_MMA
}

// Transposes an 8x8 matrix of 16-bit elements. Lane l holds elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4.
__device__ __forceinline__ u32 transpose(u32 fragment) {
    u32 result;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(fragment));
    return result;
}

// Returns the value of lane 4 n + lane % 4. With a constant n the shuffle needs no register for the source lane.
__device__ __forceinline__ float shuffle_from_quad(float value, int n) {
    constexpr int kOwnLowBits = 3 << 8 | 31;  // the source lane keeps bits 0 and 1 of this lane
    float result;
    asm volatile("shfl.sync.idx.b32 %0, %1, %2, %3, 0xffffffff;"
                 : "=f"(result)
                 : "f"(value), "r"(4 * n), "n"(kOwnLowBits));
    return result;
}

// Programmatic dependent launch (sm_90 and later): after wait_for_earlier_kernels(), a kernel sees what earlier kernels
// of the stream wrote. Without the launch attribute, wait_for_earlier_kernels() and let_next_kernel_start() do nothing.
constexpr bool kHasDependentLaunch = kHasTma;  // TMA and dependent launch both came with sm_90

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
