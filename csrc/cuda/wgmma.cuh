// Wrappers of Hopper's instructions for warpgroups (sm_90a): wgmma, TMA copies of boxes, register limits.
#pragma once
#include "ptx.cuh"

namespace mglu {

// Copies the box of a matrix that begins at (row, column) to shared memory; elements outside the matrix become zeros.
// With kBlocks > 1 the box goes to the same offset in every block of the cluster, and each block's barrier is
// signalled.
template <int kBlocks>
__device__ __forceinline__ void tma_load_box(u32 destination, const TensorMap& map, int column, int row, u32 barrier,
                                             u64 policy) {
    if constexpr (kBlocks > 1) {
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
            ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5, %6;" ::"r"(destination),
            "l"(&map), "r"(column), "r"(row), "r"(barrier), "h"(static_cast<u16>((1 << kBlocks) - 1)), "l"(policy)
            : "memory");
        return;
    }
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(destination),
        "l"(&map), "r"(column), "r"(row), "r"(barrier), "l"(policy)
        : "memory");
}

// Like tma_load_box(), but for matrix number `slice` of a stack of matrices.
template <int kBlocks>
__device__ __forceinline__ void tma_load_box_3d(u32 destination, const TensorMap& map, int column, int row, int slice,
                                                u32 barrier, u64 policy) {
    if constexpr (kBlocks > 1) {
        asm volatile(
            "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
            ".L2::cache_hint [%0], [%1, {%2, %3, %4}], [%5], %6, %7;" ::"r"(destination),
            "l"(&map), "r"(column), "r"(row), "r"(slice), "r"(barrier), "h"(static_cast<u16>((1 << kBlocks) - 1)),
            "l"(policy)
            : "memory");
        return;
    }
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(destination),
        "l"(&map), "r"(column), "r"(row), "r"(slice), "r"(barrier), "l"(policy)
        : "memory");
}

// Stores a box from shared memory; call fence_async_proxy() after writing the box. Elements outside the matrix are not
// stored. The stores that a thread issues before store_commit() form a group, for which the thread can wait.
__device__ __forceinline__ void tma_store_box(const TensorMap& map, int column, int row, u32 source, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group.L2::cache_hint [%0, {%1, %2}], [%3], %4;" ::"l"(
            &map),
        "r"(column), "r"(row), "r"(source), "l"(policy)
        : "memory");
}
__device__ __forceinline__ void store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// store_wait_read() waits until this thread's stores have read their boxes, which may then be filled again.
// store_wait() waits until the matrices are written.
__device__ __forceinline__ void store_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Stores the transposes of two 8x8 matrices of 16-bit elements. Lane l holds elements 2 (l % 4) and 2 (l % 4) + 1 of
// row l / 4 of each matrix. Lanes 0 to 15 pass addresses: column l % 8 of matrix l / 8 goes to lane l's address.
__device__ __forceinline__ void store_matrices_transposed(u32 address, u32 first, u32 second) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(first),
                 "r"(second)
                 : "memory");
}

// Prefetches a descriptor into the cache of the TMA unit.
__device__ __forceinline__ void tma_prefetch_descriptor(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Prefetches a box into L2.
__device__ __forceinline__ void tma_prefetch_box(const TensorMap& map, int column, int row) {
    asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(&map), "r"(column), "r"(row)
                 : "memory");
}

// Named barriers of kThreads threads of a block, some of which only arrive.
template <int kThreads>
__device__ __forceinline__ void named_arrive(int id) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}
template <int kThreads>
__device__ __forceinline__ void named_sync(int id) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}

// Moves registers from producer warpgroups, which need few, to consumer warpgroups. kRegisters is the new number of
// registers per thread.
template <int kRegisters>
__device__ __forceinline__ void raise_register_limit() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void lower_register_limit() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// --- wgmma ---

// Orders writes to accumulators and fragments before the products that follow.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most kPending of the latest groups are still running.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// The descriptor of a B operand in shared memory. Each column of the product has a row of 128 bytes (64 elements along
// k) in the 128-byte swizzle: 16-byte vector v of row n lies at v ^ (n % 8). Blocks of 8 rows are 1024 bytes apart.
// Adding 2 to the descriptor advances by 16 elements along k.
__device__ __forceinline__ u64 wgmma_descriptor(u32 address) {
    return static_cast<u64>(1) << 62 | static_cast<u64>(1024 >> 4) << 32 | static_cast<u64>(1) << 16 |
           static_cast<u64>((address & 0x3ffff) >> 4);
}

// The descriptor of a transposed B operand, with a row in shared memory for each k. It consists of boxes of 64 columns
// of the product, whose rows of 128 bytes are in the 128-byte swizzle. Blocks of 8 rows are 1024 bytes apart, and boxes
// are `box_bytes` apart. Adding 128 to the descriptor advances by 16 rows.
__device__ __forceinline__ u64 transposed_descriptor(u32 address, u32 box_bytes) {
    return static_cast<u64>(1) << 62 | static_cast<u64>(1024 >> 4) << 32 | static_cast<u64>(box_bytes >> 4) << 16 |
           static_cast<u64>((address & 0x3ffff) >> 4);
}

// D (64 x N, float32) += A (64 x 16, in registers) B (16 x N, in shared memory), by a warpgroup. Warp w holds rows 16 w
// to 16 w + 15 of A and D. With g = lane / 4 and q = lane % 4, a0 is elements 2q and 2q + 1 of row g, and a1 the same
// elements of row g + 8; a2 and a3 are 8 elements further. d[4 j + r] is column 8 j + 2q (even r) or 8 j + 2q + 1 (odd
// r) of row g (r < 2) or g + 8.
//
// run_sparse() takes A (64 x 32) with two values in every four columns, B (32 x N), and metadata as for
// mma_sparse_16x8x32 (ptx.cuh).
template <int N, bool kBfloat16>
struct Wgmma;

// Like Wgmma, but for A (64 x 32) and B (32 x N) of float8_e4m3fn. a0 is elements 4q to 4q + 3 of row g, and a2 is 16
// elements further. Adding 2 to the descriptor advances by 32 elements along k. Without kAdd, D is overwritten.
template <int N>
struct Fp8Wgmma;

#define MGLU_D4 "%0, %1, %2, %3"
#define MGLU_D8 MGLU_D4 ", %4, %5, %6, %7"
#define MGLU_D12 MGLU_D8 ", %8, %9, %10, %11"
#define MGLU_D16 MGLU_D12 ", %12, %13, %14, %15"
#define MGLU_D20 MGLU_D16 ", %16, %17, %18, %19"
#define MGLU_D24 MGLU_D20 ", %20, %21, %22, %23"
#define MGLU_D28 MGLU_D24 ", %24, %25, %26, %27"
#define MGLU_D32 MGLU_D28 ", %28, %29, %30, %31"
#define MGLU_D40 MGLU_D32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define MGLU_D48 MGLU_D40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define MGLU_D56 MGLU_D48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define MGLU_D64 MGLU_D56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define MGLU_D72 MGLU_D64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define MGLU_D80 MGLU_D72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define MGLU_D88 MGLU_D80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define MGLU_D96 MGLU_D88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define MGLU_F4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define MGLU_F8(i) MGLU_F4(i), MGLU_F4(i + 4)
#define MGLU_F16(i) MGLU_F8(i), MGLU_F8(i + 8)
#define MGLU_F32(i) MGLU_F16(i), MGLU_F16(i + 16)
#define MGLU_F64(i) MGLU_F32(i), MGLU_F32(i + 32)

#define MGLU_WGMMA_TYPE(N, IS_BFLOAT16, TYPE, D, A, B, METADATA, SELECTOR, ...)                                        \
    template <>                                                                                                        \
    struct Wgmma<N, IS_BFLOAT16> {                                                                                     \
        __device__ __forceinline__ static void run(float (&d)[N / 2], const u32 (&a)[4], u64 b) {                      \
            asm volatile(                                                                                              \
                "{\n\t.reg .pred add;\n\tsetp.eq.u32 add, 0, 0;\n\t"                                                   \
                "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" D "}, {" A "}, " B                \
                ", add, 1, 1, 0;\n\t}"                                                                                 \
                : __VA_ARGS__                                                                                          \
                : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                                 \
        }                                                                                                              \
        template <int kSelector>                                                                                       \
        __device__ __forceinline__ static void run_sparse(float (&d)[N / 2], const u32 (&a)[4], u64 b, u32 metadata) { \
            asm volatile(                                                                                              \
                "{\n\t.reg .pred add;\n\tsetp.eq.u32 add, 0, 0;\n\t"                                                   \
                "wgmma.mma_async.sp.sync.aligned.m64n" #N "k32.f32." TYPE "." TYPE " {" D "}, {" A "}, " B             \
                ", " METADATA ", " SELECTOR ", add, 1, 1, 0;\n\t}"                                                     \
                : __VA_ARGS__                                                                                          \
                : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(metadata), "n"(kSelector));                  \
        }                                                                                                              \
    };
#define MGLU_WGMMA_FP8(N, D, A, B, ADD, SELECTOR, ...)                                                   \
    template <>                                                                                          \
    struct Fp8Wgmma<N> {                                                                                 \
        template <bool kAdd>                                                                             \
        __device__ __forceinline__ static void run(float (&d)[N / 2], const u32 (&a)[4], u64 b) {        \
            asm volatile("{\n\t.reg .pred add;\n\tsetp.ne.u32 add, " ADD                                 \
                         ", 0;\n\t"                                                                      \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" D "}, {" A "}, " B \
                         ", add, 1, 1;\n\t}"                                                             \
                         : __VA_ARGS__                                                                   \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kAdd));               \
        }                                                                                                \
    };
#define MGLU_WGMMA(N, ...)                        \
    MGLU_WGMMA_TYPE(N, false, "f16", __VA_ARGS__) \
    MGLU_WGMMA_TYPE(N, true, "bf16", __VA_ARGS__) \
    MGLU_WGMMA_FP8(N, __VA_ARGS__)

MGLU_WGMMA(8, MGLU_D4, "%4, %5, %6, %7", "%8", "%9", "%10", MGLU_F4(0))
MGLU_WGMMA(16, MGLU_D8, "%8, %9, %10, %11", "%12", "%13", "%14", MGLU_F8(0))
MGLU_WGMMA(24, MGLU_D12, "%12, %13, %14, %15", "%16", "%17", "%18", MGLU_F8(0), MGLU_F4(8))
MGLU_WGMMA(32, MGLU_D16, "%16, %17, %18, %19", "%20", "%21", "%22", MGLU_F16(0))
MGLU_WGMMA(40, MGLU_D20, "%20, %21, %22, %23", "%24", "%25", "%26", MGLU_F16(0), MGLU_F4(16))
MGLU_WGMMA(48, MGLU_D24, "%24, %25, %26, %27", "%28", "%29", "%30", MGLU_F16(0), MGLU_F8(16))
MGLU_WGMMA(56, MGLU_D28, "%28, %29, %30, %31", "%32", "%33", "%34", MGLU_F16(0), MGLU_F8(16), MGLU_F4(24))
MGLU_WGMMA(64, MGLU_D32, "%32, %33, %34, %35", "%36", "%37", "%38", MGLU_F32(0))
MGLU_WGMMA(80, MGLU_D40, "%40, %41, %42, %43", "%44", "%45", "%46", MGLU_F32(0), MGLU_F8(32))
MGLU_WGMMA(96, MGLU_D48, "%48, %49, %50, %51", "%52", "%53", "%54", MGLU_F32(0), MGLU_F16(32))
MGLU_WGMMA(112, MGLU_D56, "%56, %57, %58, %59", "%60", "%61", "%62", MGLU_F32(0), MGLU_F16(32), MGLU_F8(48))
MGLU_WGMMA(128, MGLU_D64, "%64, %65, %66, %67", "%68", "%69", "%70", MGLU_F64(0))
MGLU_WGMMA(160, MGLU_D80, "%80, %81, %82, %83", "%84", "%85", "%86", MGLU_F64(0), MGLU_F16(64))
MGLU_WGMMA(192, MGLU_D96, "%96, %97, %98, %99", "%100", "%101", "%102", MGLU_F64(0), MGLU_F32(64))

// D (64 x 256, float32) += A (64 x 16, in registers) B (16 x 256, in shared memory, transposed).
template <bool kBfloat16>
struct WgmmaOfRows;

#define MGLU_D128                                                                                  \
    MGLU_D96                                                                                       \
    ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
    ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define MGLU_WGMMA_OF_ROWS(IS_BFLOAT16, TYPE)                                                   \
    template <>                                                                                 \
    struct WgmmaOfRows<IS_BFLOAT16> {                                                           \
        __device__ __forceinline__ static void run(float (&d)[128], const u32 (&a)[4], u64 b) { \
            asm volatile(                                                                       \
                "{\n\t.reg .pred add;\n\tsetp.eq.u32 add, 0, 0;\n\t"                            \
                "wgmma.mma_async.sync.aligned.m64n256k16.f32." TYPE "." TYPE " {" MGLU_D128     \
                "}, "                                                                           \
                "{%128, %129, %130, %131}, %132, add, 1, 1, 1;\n\t}"                            \
                : MGLU_F64(0), MGLU_F64(64)                                                     \
                : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                          \
        }                                                                                       \
    };
MGLU_WGMMA_OF_ROWS(false, "f16")
MGLU_WGMMA_OF_ROWS(true, "bf16")

}  // namespace mglu
