// MGLU for one token with plain FMAs: W and the masks are read once, every mask bit predicates one FFMA.
//
// gate_i = s_i = x (M_i * W)^T and value_i = t - s_i with t = x W^T. A warp owns kRows rows of W and every
// kSplitK-th stage of 256 columns; lane l takes the stage's l-th octet (8 weights) of each row. Its ring of stages
// (stage_ring.cuh) is filled by cp.async, so loads never wait for arithmetic and need no registers. Per weight: one
// conversion, one FFMA for t, and per mask one FFMA under a predicate; R2P turns 7 mask bits into predicates at once.
// For up to 8 masks that takes less time than reading does; for more, sparse tensor cores take less (decode_mma.cu).
//
// Needs what decode_mma.cu needs, and one token.
#include "element.cuh"
#include "finish.cuh"
#include "params.cuh"
#include "ptx.cuh"
#include "stage_ring.cuh"

namespace mglu {

constexpr int kType = MGLU_ELEMENT;
constexpr int kMasks = MGLU_N_MASKS;
constexpr int kTiles = MGLU_TILES;
constexpr int kSplitK = MGLU_SPLIT_K;
constexpr int kStages = MGLU_STAGES;
constexpr int kRows = MGLU_ROWS;
constexpr int kBlocksPerSm = MGLU_BLOCKS_PER_SM;
constexpr bool kEarlyWeights = MGLU_EARLY_WEIGHTS;

constexpr int kSub = MGLU_SUB;  // octets of a row that a lane takes a stage

constexpr int kWarps = kTiles * kSplitK;
constexpr int kThreads = 32 * kWarps;
constexpr int kOctets = 32 * kSub;
using Stage = StageShape<kRows, kOctets, kMasks, MGLU_MASK_VECTOR, false>;
constexpr int kSums = kRows * (1 + kMasks);
constexpr int kRingBytes = kStages * Stage::kBytes;
constexpr int kSumBytes = (4 * kSums + 127) / 128 * 128;
// With the whole of k in one warp, every warp finishes its own rows and the block never waits for all its warps.
constexpr bool kAlone = kSplitK == 1;
using Output =
    OutputShape<kType, kMasks, MGLU_ACTIVATION, MGLU_ROUTE, kAlone ? 1 : kTiles, kSplitK, kRows, 1, kSumBytes>;

__device__ __forceinline__ void unpack(float (&value)[8], const Vec16& v) {
#pragma unroll
    for (int k = 0; k < 8; ++k) value[k] = to_float<kType>(static_cast<u16>(v.word[k / 2] >> (16 * (k % 2))));
}

// x as float32: per 256 columns, the low halves of the 32 octets, then the high halves, so that both reads are 512 bytes
// in lane order.
__device__ __forceinline__ void store_x(const Params& p, float* shared_x, int blocks) {
    const u16* x = static_cast<const u16*>(p.x);
    for (int octet = threadIdx.x; octet < blocks * 32; octet += kThreads) {
        float value[8];
        if (octet * 8 >= p.in_features) {
#pragma unroll
            for (int j = 0; j < 8; ++j) value[j] = 0.0f;
        } else if (p.x_is_vectorizable) {
            unpack(value, *reinterpret_cast<const Vec16*>(x + octet * 8));
        } else {
#pragma unroll
            for (int j = 0; j < 8; ++j) value[j] = to_float<kType>(x[(octet * 8 + j) * p.x_column_stride]);
        }
        float4* place = reinterpret_cast<float4*>(shared_x + octet / 32 * 256) + octet % 32;
        place[0] = make_float4(value[0], value[1], value[2], value[3]);
        place[32] = make_float4(value[4], value[5], value[6], value[7]);
    }
}

// The mask bytes of one octet, four masks a word.
struct MaskBytes {
    static constexpr int kWords = (kMasks + 3) / 4;
    u32 word[kWords];

    __device__ __forceinline__ void load(u32 address) {
        if constexpr (kMasks == 16) {
            const Vec16 v = load_shared_16(address);
#pragma unroll
            for (int w = 0; w < 4; ++w) word[w % kWords] = v.word[w];
        } else if constexpr (kMasks % 8 == 0) {
            asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(word[0]), "=r"(word[kWords - 1]) : "r"(address) : "memory");
        } else if constexpr (kMasks % 4 == 0) {
#pragma unroll
            for (int w = 0; w < kWords; ++w) word[w] = load_shared_4(address + 4 * w);
        } else {
#pragma unroll
            for (int w = 0; w < kWords; ++w) word[w] = 0;
#pragma unroll
            for (int i = 0; i < kMasks; ++i) {
                u32 byte;
                asm volatile("ld.shared.u8 %0, [%1];" : "=r"(byte) : "r"(address + i) : "memory");
                word[i / 4] |= byte << (8 * (i % 4));
            }
        }
    }
};

// sum += x * w where the bit (a constant, after unrolling) is set. Spelled so that ptxas fuses a byte's tests into R2P.
__device__ __forceinline__ void add_where(float& sum, float x, float w, u32 word, u32 bit) {
    asm("{\n\t.reg .pred p;\n\t.reg .b32 t;\n\tand.b32 t, %3, %4;\n\tsetp.ne.u32 p, t, 0;\n\t"
        "@p fma.rn.f32 %0, %1, %2, %0;\n\t}"
        : "+f"(sum)
        : "f"(x), "f"(w), "r"(word), "r"(bit));
}

struct Octet {
    Vec16 weights;
    MaskBytes masks;

    // sums: [1 + kMasks][kRows], t first.
    __device__ __forceinline__ void add_to(float (&sums)[kSums], int row, const float (&x)[8]) const {
        float w[8];
        unpack(w, weights);
#pragma unroll
        for (int k = 0; k < 8; ++k) sums[row] = fmaf(x[k], w[k], sums[row]);
#pragma unroll
        for (int i = 0; i < kMasks; ++i)
#pragma unroll
            for (int k = 0; k < 8; ++k)
                add_where(sums[(1 + i) * kRows + row], x[k], w[k], masks.word[i / 4], 1u << (8 * (i % 4) + k));
    }
};

// Adds kCount values over the 32 lanes with about kCount shuffles: at each step a lane keeps one half of the values
// and hands the other half to its partner. Then it writes the values it ended up with.
template <int kCount, int kDistance = 16>
struct LaneSum {
    static constexpr int kHalf = (kCount + 1) / 2;

    static __device__ __forceinline__ void run(const float (&value)[kCount], float* out, int lane, int first, int end) {
        const bool upper = lane & kDistance;
        float kept[kHalf];
#pragma unroll
        for (int i = 0; i < kHalf; ++i) {
            const float other = kHalf + i < kCount ? value[(kHalf + i) % kCount] : 0.0f;
            const float sent = upper ? value[i] : other;
            kept[i] = (upper ? other : value[i]) + __shfl_xor_sync(0xffffffffu, sent, kDistance);
        }
        // `end` keeps the padding of an odd count from being written over a neighbour's value.
        const int new_first = upper ? first + kHalf : first;
        LaneSum<kHalf, kDistance / 2>::run(kept, out, lane, new_first, upper ? end : min(end, first + kHalf));
    }
};

template <int kCount>
struct LaneSum<kCount, 0> {
    static __device__ __forceinline__ void run(const float (&value)[kCount], float* out, int, int first, int end) {
#pragma unroll
        for (int i = 0; i < kCount; ++i)
            if (first + i < end) out[first + i] = value[i];
    }
};

}  // namespace mglu

extern "C" __global__ void __launch_bounds__(mglu::kThreads, mglu::kBlocksPerSm)
    mglu_decode_fma(const __grid_constant__ mglu::Params p) {
    using namespace mglu;
    extern __shared__ __align__(128) u8 shared[];
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int part = warp % kSplitK;
    const u32 ring = shared_address(shared) + warp * kRingBytes;
    u8* sums_of_block = shared + kWarps * kRingBytes;
    float* shared_x = reinterpret_cast<float*>(sums_of_block + kWarps * kSumBytes);

    // The grid may be smaller than the problem: a block then walks over several sets of tiles, and its rings run on
    // from one to the next. Warps on their own take every gridDim-th tile, so that the last, incomplete round is
    // spread over all blocks; warps that share a tile stay in neighbouring rows.
    const int tiles = (p.out_features + kRows - 1) / kRows;
    const int first_tile = kAlone ? warp * gridDim.x + blockIdx.x : blockIdx.x * kTiles + warp / kSplitK;
    const int tile_step = gridDim.x * kTiles;
    const int stages = (p.in_features / 8 + kOctets - 1) / kOctets;
    const int mine = (stages - part + kSplitK - 1) / kSplitK;  // of every tile

    let_next_kernel_start();
    if constexpr (!kEarlyWeights) wait_for_earlier_kernels();

    StageLoader<Stage, kSplitK> loader(p, true);
    int load_tile = mine > 0 ? first_tile : tiles;
    int load_left = mine;
    // A last tile that would run over the end starts higher instead, and computes some rows a second time.
    const auto tile_row = [&](int tile) { return min(tile * kRows, p.out_features - kRows); };
    const auto feed = [&](u32 slot) {
        if (load_tile < tiles) {
            loader.load_next(slot);
            if (--load_left == 0) {
                load_left = mine;
                load_tile += tile_step;
                if (load_tile < tiles) loader.start(p, tile_row(load_tile), part);
            }
        }
        copy_async_commit();
    };
    if (load_tile < tiles) loader.start(p, tile_row(load_tile), part);
#pragma unroll
    for (int s = 0; s < kStages; ++s) feed(ring + s * Stage::kBytes);

    if constexpr (kEarlyWeights) wait_for_earlier_kernels();
    store_x(p, shared_x, stages * kSub);
    __syncthreads();

    u32 slot = ring;
    const u32 x_start = shared_address(shared_x) + part * (kSub * 1024) + lane * 16;
    // Blocks of warps that share tiles run the same number of rounds in all warps, because they meet in barriers.
    for (int tile = first_tile; kAlone ? tile < tiles : tile - warp / kSplitK < tiles; tile += tile_step) {
        float sums[kSums] = {};
        u32 x_address = x_start;
        const int rounds = tile < tiles ? mine : 0;
        for (int n = 0; n < rounds; ++n) {
            copy_async_wait<kStages - 1>();  // the oldest stage has landed, for this lane's copies
            __syncwarp();                    // and for the other lanes'
#pragma unroll
            for (int c = 0; c < kSub; ++c) {
                Octet row[kRows];
#pragma unroll
                for (int r = 0; r < kRows; ++r) {
                    const int place = r * kOctets + c * 32 + lane;
                    row[r].weights = load_shared_16(slot + place * 16);
                    row[r].masks.load(slot + Stage::kWeightBytes + place * kMasks);
                }
                if (c == kSub - 1) {
                    // The stage now lives in registers: refill its slot before the arithmetic.
                    __syncwarp();
                    feed(slot);
                }
                float x[8];
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const Vec16 v = load_shared_16(x_address + c * 1024 + half * 512);
#pragma unroll
                    for (int j = 0; j < 4; ++j) x[4 * half + j] = __uint_as_float(v.word[j]);
                }
#pragma unroll
                for (int r = 0; r < kRows; ++r) row[r].add_to(sums, r, x);
            }
            x_address += kSplitK * (kSub * 1024);
            slot = slot + Stage::kBytes == ring + kRingBytes ? ring : slot + Stage::kBytes;
        }

        u8* sums_of_warp = sums_of_block + warp * kSumBytes;
        LaneSum<kSums>::run(sums, reinterpret_cast<float*>(sums_of_warp), lane, 0, kSums);
        if constexpr (kAlone) {
            __syncwarp();
            finish<Output>(p, sums_of_warp, tile * kRows, lane);
            __syncwarp();
        } else {
            __syncthreads();
            finish<Output>(p, sums_of_block, (tile - warp / kSplitK) * kRows, threadIdx.x);
            __syncthreads();
        }
    }
}
