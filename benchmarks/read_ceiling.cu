// The read ceiling: a kernel that only reads the bytes of W and of the masks, each once. The time of every decode kernel
// is reported as a fraction of this kernel's time. benchmarks/ceiling.py defines MGLU_UNROLL: loads in flight per thread.

struct alignas(16) Vec16 {
    unsigned word[4];
};

__device__ __forceinline__ unsigned read_once(const Vec16* source) {
    Vec16 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
                 : "l"(source));
    return v.word[0] ^ v.word[1] ^ v.word[2] ^ v.word[3];
}

__device__ __forceinline__ unsigned read_all(const Vec16* source, long long vectors) {
    const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
    const long long first = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    unsigned sink = 0;
    long long at = first;
    for (; at + (MGLU_UNROLL - 1) * step < vectors; at += MGLU_UNROLL * step) {
        unsigned part[MGLU_UNROLL];
#pragma unroll
        for (int u = 0; u < MGLU_UNROLL; ++u) part[u] = read_once(source + at + u * step);
#pragma unroll
        for (int u = 0; u < MGLU_UNROLL; ++u) sink ^= part[u];
    }
    for (; at < vectors; at += step) sink ^= read_once(source + at);
    return sink;
}

// The store depends on every load, so that the compiler keeps the loads; the condition is practically never true.
extern "C" __global__ void read_ceiling(const Vec16* weight, long long weight_vectors, const Vec16* masks,
                                        long long mask_vectors, unsigned* out) {
    const unsigned sink = read_all(weight, weight_vectors) ^ read_all(masks, mask_vectors);
    if (sink == 0x5bd1e995u) *out = sink;
}
