// The two GEMMs of the backward pass on Hopper. G is the gradient of the result y, and S_i are the partial derivatives
// P, Q_1, Q_2, ... of y (training.md). The A operand, the elementwise product G * S_i, is computed in registers and
// never stored.
//
//     MGLU_GRAD_X = 1:  grad_x[token, h] = sum over i, d of (G * S_i)[token, d] (F_i * W)[d, h]
//     MGLU_GRAD_X = 0:  D_i[d, h]        = sum over tokens of (G * S_i)[token, d] x[token, h]
//
// Here i starts at 0, F_0 = 1, d is a row of W, and h is a column of W. The sign-flipped weights F_i * W are matrices
// in memory. A block computes tiles of 128 rows by 256 columns of the result. The producer, one thread in a warpgroup
// of its own, loads stages of kDepth columns of A and kDepth rows of B by TMA into a ring in shared memory. Two
// consumer warpgroups of 64 rows each read G and S_i as wgmma fragments, multiply them in registers, and multiply the
// products with B. The rows of B lie along k, which wgmma takes as a transposed operand.
//
// For grad_x, the stages of one chunk of d go through all i, so that the chunk of G is loaded once for all i. For D_i,
// the two warpgroups of a block take the same rows of W and neighbouring i if possible, so that they share G. The
// blocks of a cluster compute the same columns and load B for each other.
//
// Every accumulator sums k in ascending steps of 16 for any grid, so results have the same bits in every run.
//
// Requirements: 16-bit elements, matrices whose rows are 16-byte aligned.
#include "element.cuh"
#include "wgmma.cuh"

namespace mglu {

constexpr int kType = MGLU_ELEMENT;
constexpr int kProducts = MGLU_PRODUCTS;  // number of values of i
constexpr bool kInputGradient = MGLU_GRAD_X != 0;
constexpr int kCluster = MGLU_CLUSTER;  // 1 or 2
constexpr int kStages = MGLU_STAGES;
constexpr int kDepth = MGLU_DEPTH;      // columns of A in a stage: 32 or 64
constexpr bool kWide = MGLU_WIDE != 0;  // computes only D_0, in float32

constexpr int kRows = 128;          // rows of a tile
constexpr int kColumns = 256;       // columns of a tile
constexpr int kBox = kDepth * 128;  // bytes of a box of B: kDepth rows of 128 bytes
constexpr int kConsumers = 2;
constexpr int kThreads = 128 * (kConsumers + 1);
constexpr int kConsumerRegisters = 240;
constexpr int kProducerRegisters = 24;

// A stage of the ring holds G and S_i, then four boxes of 64 columns of B. For grad_x, each of G and S_i is one box of
// 128 tokens by kDepth columns of d. For D_i, each is two boxes of kDepth tokens by 64 columns of d. Rows are swizzled:
// the 16-byte vector v of row r lies at v ^ (r % 8) in rows of 128 bytes, and at v ^ (r / 2 % 4) in rows of 64 bytes.
constexpr int kOperandBytes = kRows * kDepth * 2;
constexpr int kBBytes = kDepth * kColumns * 2;
constexpr int kStageBytes = 2 * kOperandBytes + kBBytes;

// Stages that the mainloop unrolls. The number is even, since fragments alternate between two sets of registers. For
// grad_x it covers whole chunks of d, since G is read in the first stage of a chunk. Stages past the end hold zeros.
constexpr int kUnrolled = !kInputGradient ? 2 : kProducts % 2 == 0 ? kProducts : 2 * kProducts;

struct Params {
    void* others;  // D_1, D_2, ...: [kProducts - 1, out_features, in_features]; null for grad_x
    void* out;     // grad_x [tokens, in_features], or D_0 [out_features, in_features], in float32 with kWide
    int tokens;
    int out_features;
    int in_features;
    TensorMap grad_output;  // G [tokens][out_features]
    TensorMap partials;     // S [tokens][kProducts or more][out_features]
    TensorMap b;            // W [out_features][in_features], or x [tokens][in_features]
    TensorMap flipped;      // F_i * W [kProducts - 1][out_features][in_features]; zeros for D_i
};

// --- the order of work ---

// The 64 rows by 256 columns that a warpgroup computes.
struct Part {
    int product;  // the i of D_i; 0 for grad_x
    int row;      // first row: a token, or for D_i a row of W
};

__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

__device__ __forceinline__ int column_tiles(const Params& p) { return ceil_div(p.in_features, kColumns); }

// The number of work tiles, each of which is computed by a cluster. All column tiles of the same rows follow one
// another, so that blocks that run at the same time share the rows of A through L2.
__device__ __forceinline__ int cluster_tiles(const Params& p) {
    const int parts = kInputGradient ? ceil_div(p.tokens, 64) : ceil_div(p.out_features, 64) * kProducts;
    return ceil_div(parts, kConsumers * kCluster) * column_tiles(p);
}

__device__ __forceinline__ int column_at(const Params& p, int index) { return index % column_tiles(p) * kColumns; }

// Parts are ordered by rows of W, and by i for the same rows. Parts past the last row are computed from zeros and not
// written.
__device__ __forceinline__ Part part_at(const Params& p, int index, int rank, int warpgroup) {
    const int part = (index / column_tiles(p) * kCluster + rank) * kConsumers + warpgroup;
    if constexpr (kInputGradient) return {0, part * 64};
    return {part % kProducts, part / kProducts * 64};
}

// True if the two warpgroups of a block have the same rows of W, and therefore the same G.
__device__ __forceinline__ bool share_gradient(const Params& p, int index, int rank) {
    return !kInputGradient && part_at(p, index, rank, 0).row == part_at(p, index, rank, 1).row;
}

// The number of stages of a tile, rounded up to a multiple of kUnrolled.
__device__ __forceinline__ int step_count(const Params& p) {
    const int steps = kInputGradient ? ceil_div(p.out_features, kDepth) * kProducts : ceil_div(p.tokens, kDepth);
    return ceil_div(steps, kUnrolled) * kUnrolled;
}

struct RingPosition {
    int slot = 0;
    u32 parity = 0;

    __device__ __forceinline__ void advance() {
        if (++slot == kStages) {
            slot = 0;
            parity ^= 1;
        }
    }
};

// --- the producer ---

__device__ __forceinline__ void produce(const Params& p, u32 ring, u32 full, u32 empty, int rank) {
    tma_prefetch_descriptor(p.grad_output);
    tma_prefetch_descriptor(p.partials);
    tma_prefetch_descriptor(p.b);
    if constexpr (kInputGradient) tma_prefetch_descriptor(p.flipped);
    wait_for_earlier_kernels();
    constexpr int kBoxes = kColumns / 64 / kCluster;  // boxes of B that this block loads for the whole cluster
    const u64 policy = cache_policy(false);
    const int tiles = cluster_tiles(p);
    const int steps = step_count(p);
    RingPosition position;
    for (int index = blockIdx.x / kCluster; index < tiles; index += gridDim.x / kCluster) {
        const Part first = part_at(p, index, rank, 0);
        const Part second = part_at(p, index, rank, 1);
        const bool shares_gradient = share_gradient(p, index, rank);
        const int first_column = column_at(p, index) + rank * kBoxes * 64;
        int product = 0;  // for grad_x, the i of the stage
        int chunk = 0;    // index of a chunk of d for grad_x, or of tokens for D_i
        for (int step = 0; step < steps; ++step) {
            const u32 slot = ring + position.slot * kStageBytes;
            const u32 barrier = full + 8 * position.slot;
            const u32 partials = slot + kOperandBytes;
            const u32 b = slot + 2 * kOperandBytes + rank * kBoxes * kBox;
            const int k = chunk * kDepth;
            barrier_wait(empty + 8 * position.slot, position.parity ^ 1);
            if constexpr (kInputGradient) {
                barrier_arrive_expect_bytes(barrier, kStageBytes - (product > 0 ? kOperandBytes : 0));
                if (product == 0) tma_load_box<1>(slot, p.grad_output, k, first.row, barrier, policy);
                tma_load_box_3d<1>(partials, p.partials, k, product, first.row, barrier, policy);
#pragma unroll
                for (int box = 0; box < kBoxes; ++box) {
                    const u32 to = b + box * kBox;
                    const int column = first_column + box * 64;
                    if (product == 0) tma_load_box<kCluster>(to, p.b, column, k, barrier, policy);
                    else tma_load_box_3d<kCluster>(to, p.flipped, column, k, product - 1, barrier, policy);
                }
                if (++product == kProducts) product = 0, ++chunk;
            } else {
                barrier_arrive_expect_bytes(barrier, kStageBytes - (shares_gradient ? kBox : 0));
                tma_load_box<1>(slot, p.grad_output, first.row, k, barrier, policy);
                if (!shares_gradient) tma_load_box<1>(slot + kBox, p.grad_output, second.row, k, barrier, policy);
                tma_load_box_3d<1>(partials, p.partials, first.row, first.product, k, barrier, policy);
                tma_load_box_3d<1>(partials + kBox, p.partials, second.row, second.product, k, barrier, policy);
#pragma unroll
                for (int box = 0; box < kBoxes; ++box)
                    tma_load_box<kCluster>(b + box * kBox, p.b, first_column + box * 64, k, barrier, policy);
                ++chunk;
            }
            position.advance();
        }
    }
    // Do not exit yet: the other block of the cluster still signals this block's barriers when it releases a stage.
    for (int s = 0; kCluster > 1 && s < kStages; ++s, position.advance())
        barrier_wait(empty + 8 * position.slot, position.parity ^ 1);
}

// --- the consumers ---

// Multiplies two packed pairs of 16-bit floats, rounding to nearest.
__device__ __forceinline__ u32 multiply_pairs(u32 a, u32 b) {
    u32 product;
    if constexpr (kType == kBfloat16) asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    else asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}

// A thread's share of a warpgroup's sums, which have 64 rows and 256 columns, and its operands in registers.
struct Accumulators {
    float sums[kColumns / 2];
    u32 a[2][kDepth / 16][4];      // G * S_i of a stage, in two sets, one of which the tensor cores may still read
    u32 gradient[kDepth / 16][4];  // G of a chunk

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int c = 0; c < kColumns / 2; ++c) sums[c] = 0.0f;
    }

    // Reads a fragment of wgmma's A operand from G or S_i: 64 rows, and 16 columns along k.
    __device__ __forceinline__ static void load(u32 (&to)[4], u32 from, int step) {
        // For D_i the rows in shared memory are tokens, which are A's columns, so these fragments are transposed.
        if constexpr (kInputGradient) load_matrices(to, from ^ step * 32);
        else load_transposed_matrices(to, from + step * (16 * 128));
    }

    // Computes G * S_i of a stage. The lane reads S_i from `partials_at` and G from `gradient_at`.
    template <bool kWithGradient>
    __device__ __forceinline__ void load_operand(u32 (&to)[kDepth / 16][4], u32 partials_at, u32 gradient_at) {
#pragma unroll
        for (int s = 0; s < kDepth / 16; ++s) {
            u32 partials[4];
            if constexpr (kWithGradient) load(gradient[s], gradient_at, s);
            load(partials, partials_at, s);
#pragma unroll
            for (int r = 0; r < 4; ++r) to[s][r] = multiply_pairs(partials[r], gradient[s][r]);
        }
    }

    __device__ __forceinline__ void multiply(const u32 (&operand)[kDepth / 16][4], u64 b) {
        // Keep the last write of the fragments here. Otherwise ptxas may make the wgmmas wait for each other.
#pragma unroll
        for (int s = 0; s < kDepth / 16; ++s)
            asm volatile("" ::"r"(operand[s][0]), "r"(operand[s][1]), "r"(operand[s][2]), "r"(operand[s][3]));
        wgmma_fence();
#pragma unroll
        for (int s = 0; s < kDepth / 16; ++s)
            WgmmaOfRows<kType == kBfloat16>::run(sums, operand[s], b + s * (16 * 128 >> 4));
        wgmma_commit();
    }
};

// The offset in a stage from which a lane reads G or S_i. For grad_x, the lane reads vector lane / 16 of the warp's row
// lane % 16. For D_i, the warp's 16 rows are two vectors of each token; the lane reads vector lane / 8 % 2 of token
// lane % 8 + 8 (lane / 16).
__device__ __forceinline__ u32 operand_offset(int warp, int lane) {
    if constexpr (kInputGradient) {
        const int row = warp * 16 + lane % 16;
        return row * (2 * kDepth) + (lane / 16 ^ (kDepth == 64 ? row % 8 : row / 2 % 4)) * 16;
    } else {
        const int token = lane % 8 + lane / 16 * 8;
        return token * 128 + ((2 * warp + lane / 8 % 2) ^ token % 8) * 16;
    }
}

// Transposes 4 words in each of 4 neighbouring lanes: lane q gets word q of each lane.
__device__ __forceinline__ Vec16 transpose_over_quad(const u32 (&word)[4], int lane) {
    // Swap 2 x 2 blocks inside pairs of lanes first, then blocks of 2 words between pairs.
    u32 pair[4];
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const bool odd = lane % 2 != 0;
        const u32 other = __shfl_xor_sync(~0u, odd ? word[i] : word[i + 1], 1);
        pair[i] = odd ? other : word[i];
        pair[i + 1] = odd ? word[i + 1] : other;
    }
    Vec16 result;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const bool high = lane % 4 >= 2;
        const u32 other = __shfl_xor_sync(~0u, high ? pair[i] : pair[i + 2], 2);
        result.word[i] = high ? other : pair[i];
        result.word[i + 2] = high ? pair[i + 2] : other;
    }
    return result;
}

// Writes a warp's rows in float32. A lane holds rows g and g + 8, and columns 2q and 2q + 1 of every 8.
__device__ __forceinline__ void store_wide(const Params& p, const float (&sums)[kColumns / 2], const Part& part,
                                           int first_column, int warp, int lane) {
    const int columns = p.in_features - first_column - lane % 4 * 2;  // from the lane's first column on
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = part.row + 16 * warp + lane / 4 + 8 * half;
        if (row >= p.out_features) continue;
        float* to = static_cast<float*>(p.out) + (static_cast<i64>(row + 1) * p.in_features - columns);
#pragma unroll
        for (int j = 0; j < kColumns / 8; ++j) {
            if (8 * j >= columns) break;
            to[8 * j] = sums[4 * j + 2 * half];
            to[8 * j + 1] = sums[4 * j + 2 * half + 1];
        }
    }
}

// Writes a warp's rows in 16 bits.
__device__ __forceinline__ void store(const Params& p, const float (&sums)[kColumns / 2], const Part& part,
                                      int first_column, int warp, int lane) {
    const int rows = kInputGradient ? p.tokens : p.out_features;
    u16* out = static_cast<u16*>(p.out);
    if (!kInputGradient && part.product > 0)
        out = static_cast<u16*>(p.others) + static_cast<i64>(part.product - 1) * p.out_features * p.in_features;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = part.row + 16 * warp + lane / 4 + 8 * half;
        const i64 first = static_cast<i64>(row) * p.in_features;
#pragma unroll
        for (int j = 0; j < kColumns / 8; j += 4) {
            u32 word[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                word[i] = from_floats<kType>(sums[4 * (j + i) + 2 * half], sums[4 * (j + i) + 2 * half + 1]);
            const Vec16 vector = transpose_over_quad(word, lane);
            const int column = first_column + 8 * (j + lane % 4);
            if (row < rows && column < p.in_features) *reinterpret_cast<Vec16*>(out + first + column) = vector;
        }
    }
}

// Releases a stage by arriving at `empty`, its empty barrier. In a cluster, lane n passes the address of block n's
// barrier.
__device__ __forceinline__ void release_stage(u32 empty, int lane) {
    __syncwarp();
    if constexpr (kCluster > 1) {
        if (lane < kCluster) barrier_arrive_in_cluster(empty);
    } else {
        if (lane == 0) barrier_arrive(empty);
    }
}

__device__ __forceinline__ void consume(const Params& p, u32 ring, u32 full, u32 empty, int warpgroup, int rank) {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x % 128 / 32;
    const u32 operand = ring + operand_offset(warp, lane);
    const u64 b = transposed_descriptor(ring + 2 * kOperandBytes, kBox);
    const int rounds = step_count(p) / kUnrolled;
    const int tiles = cluster_tiles(p);
    RingPosition position;
    Accumulators accumulators;
    for (int index = blockIdx.x / kCluster; index < tiles; index += gridDim.x / kCluster) {
        // Each warpgroup reads 64 rows of S_i's boxes. The two warpgroups may read the same rows of G.
        const u32 partials = operand + kOperandBytes + warpgroup * (kOperandBytes / 2);
        const u32 gradient = operand + (share_gradient(p, index, rank) ? 0 : warpgroup * (kOperandBytes / 2));
        accumulators.clear();
        u32 in_use = 0;  // the empty barrier of the previous stage, whose products may still run
#pragma unroll 1
        for (int round = 0; round < rounds; ++round) {
#pragma unroll
            for (int u = 0; u < kUnrolled; ++u) {
                const u32 offset = position.slot * kStageBytes;
                barrier_wait(full + 8 * position.slot, position.parity);
                __syncwarp();
                auto& a = accumulators.a[u % 2];
                if (!kInputGradient || u % kProducts == 0)
                    accumulators.template load_operand<true>(a, partials + offset, gradient + offset);
                else accumulators.template load_operand<false>(a, partials + offset, gradient + offset);
                accumulators.multiply(a, b + (offset >> 4));
                wgmma_wait<1>();
                if (u > 0 || round > 0) release_stage(in_use, lane);
                in_use = empty + 8 * position.slot;
                position.advance();
            }
        }
        wgmma_wait<0>();
        release_stage(in_use, lane);
        const Part part = part_at(p, index, rank, warpgroup);
        const int column = column_at(p, index);
        if constexpr (kWide) store_wide(p, accumulators.sums, part, column, warp, lane);
        else store(p, accumulators.sums, part, column, warp, lane);
    }
}

}  // namespace mglu

extern "C" __global__ void MGLU_CLUSTER_DIMS __launch_bounds__(mglu::kThreads, 1)
    mglu_backward_gemm(const __grid_constant__ mglu::Params p) {
    using namespace mglu;
    extern __shared__ __align__(1024) u8 shared[];
    const u32 ring = shared_address(shared);
    // Each slot of the ring has two barriers. full: the copies have arrived. empty: all consumers of all blocks of the
    // cluster have released the slot.
    const u32 full = ring + kStages * kStageBytes;
    const u32 empty = full + 8 * kStages;
    if (threadIdx.x == 0) {
        for (int s = 0; s < kStages; ++s) {
            barrier_init(full + 8 * s, 1);  // the producer thread
            barrier_init(empty + 8 * s, 4 * kConsumers * kCluster);
        }
        fence_async_proxy();
    }
    if constexpr (kCluster > 1) arrive_in_cluster(), wait_for_cluster();
    __syncthreads();
    let_next_kernel_start();

    const int warpgroup = threadIdx.x / 128;
    const int rank = kCluster > 1 ? rank_in_cluster() : 0;
    if (warpgroup == kConsumers) {
        lower_register_limit<kProducerRegisters>();
        if (threadIdx.x % 128 == 0) produce(p, ring, full, empty, rank);
    } else {
        raise_register_limit<kConsumerRegisters>();
        const u32 released = kCluster > 1 ? address_in_cluster(empty, threadIdx.x % kCluster) : empty;
        consume(p, ring, full, released, warpgroup, rank);
    }
}
