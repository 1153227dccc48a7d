// The down projection of a layer of experts: weight[expert_ids[t, k]] y[t, k] for each token t and each of its experts
// k. The page of this kernel is experts_down.md.
//
// A row of y is a (token, expert) pair. An item is up to kTokens pairs of one expert (expert_items.cuh). A work tile is
// the product of an item with kRows rows of W, over all columns. The kernel is persistent: each block takes every
// gridDim.x-th work tile. Neighbouring work tiles have the same rows, so that items of one expert share reads of W
// through L2. cp.async fills a ring of kStages stages of 128 columns in shared memory. The ring runs on from one work
// tile to the next: while a block writes its sums, the first stages of its next work tile arrive.
//
// For one token (kTokens == 1) a work tile is kRows rows of W with all experts of the token. The block adds the
// experts' sums with their weights, in the order of k, and writes the result. The stages are divided among kTeams teams
// of warps, each with a ring of its own. For more tokens the block writes the sums of each pair in float32, and
// combine_experts.cu adds the sums of a token.
//
// The order of a row's sum depends on in_features and on the launch configuration, not on the other rows of its item.
//
// Requirements: in_features is a multiple of 8 (of 16 for 8-bit weights, of 32 for 4-bit weights), rows of the weight
// and of y are 16-byte aligned, out_features >= kRows, fewer than 65536 pairs.
#include "element.cuh"
#include "expert_items.cuh"
#include "params.cuh"
#include "ptx.cuh"
#include "weight_format.cuh"

namespace mglu {

constexpr int kType = MGLU_ELEMENT;
constexpr WeightFormat kFormat = static_cast<WeightFormat>(MGLU_WEIGHT_FORMAT);
constexpr int kExpertWeightType = MGLU_EXPERT_WEIGHTS;
constexpr int kTokens = MGLU_BLOCK_TOKENS;  // pairs of an item: 1, or a multiple of 8
constexpr int kRowTiles = MGLU_ROW_TILES;   // tiles of 16 rows in a warp
constexpr int kRowWarps = MGLU_ROW_WARPS;   // warps of a team, which compute different rows
constexpr int kTeams = MGLU_TEAMS;          // teams of a block, each with every kTeams-th stage
constexpr int kStages = MGLU_STAGES;
constexpr int kBlocksPerSm = MGLU_BLOCKS_PER_SM;
constexpr int kParts = MGLU_PARTS;  // maximum split-K of a work tile

constexpr bool kOneToken = kTokens == 1;
static_assert(kRowWarps == 1 || kTeams < 16, "a named barrier for each team");
static_assert((kRowWarps & (kRowWarps - 1)) == 0, "a copy is a power of two of rows");
static_assert(kRowTiles <= 2, "a team has a thread for each row");
static_assert(kOneToken || (kTokens % 8 == 0 && kTeams == 1), "teams divide the stages of one token");
static_assert(!kOneToken || kParts == 1, "nothing adds the parts of one token");
constexpr int kTokenTiles = (kTokens + 7) / 8;
constexpr int kTeamThreads = 32 * kRowWarps;
constexpr int kThreads = kTeamThreads * kTeams;
constexpr int kRows = 16 * kRowTiles * kRowWarps;

using PairItems = ExpertItems<kTokens, kThreads / 32>;
using Weight = WeightPairs<kFormat, kType>;
constexpr int kBits = Weight::kBits;
constexpr int kElementBytes = kBits == 16 ? 2 : 1;  // bytes of a stored element
constexpr int kScaleElementBytes = kFormat == WeightFormat::int4_group ? 2 : 4;

// A stage holds 128 columns: first those of kRows rows of W, then those of each token of y, and then the rows' scales
// for these columns. A warp multiplies steps of 32 columns, 8 neighbouring columns in each lane. The steps of a row are
// permuted, so that the rows that a warp reads at once lie in different banks.
constexpr int kColumns = 128;
constexpr int kRowBytes = kColumns * kBits / 8;
constexpr int kStepBytes = kRowBytes / 4;
constexpr int kTokenBytes = kColumns * 2;
constexpr int kTokenStepBytes = kTokenBytes / 4;
constexpr bool kHasScales = kFormat != WeightFormat::dense;
constexpr int kTokensAt = kRows * kRowBytes;
constexpr int kScalesAt = kTokensAt + kTokens * kTokenBytes;
constexpr int kStageBytes = (kScalesAt + (kHasScales ? 4 * kRows : 0) + 255) / 256 * 256;
constexpr int kRingBytes = kStages * kStageBytes;
constexpr int kSumBytes = kOneToken ? 4 * kTeams * kRows : 0;  // bytes of sums, after the rings and before the items
static_assert(kColumns == kScaledTogether, "a stage has one group of columns");

__device__ __forceinline__ constexpr int permuted_step(int row) { return kBits == 4 ? row / 2 % 4 : row % 4; }

// The address of a row's scale in the first stage. If groups of columns have scales, the scale of the next stage
// follows in memory.
__device__ __forceinline__ const u8* first_scale(const DownParams& p, int expert, int row) {
    const int groups = (p.in_features + kColumns - 1) / kColumns;
    const i64 index = kScalesRows<kFormat>                 ? row
                      : kFormat == WeightFormat::fp8_block ? static_cast<i64>(row / kScaledTogether) * groups
                                                           : static_cast<i64>(row) * groups;
    return static_cast<const u8*>(p.weight_scale) + (expert * p.scale_stride + index) * kScaleElementBytes;
}

__device__ __forceinline__ void wait_for_team(int team) {
    if constexpr (kTeams == 1) __syncthreads();
    else if constexpr (kRowWarps == 1) __syncwarp();
    else asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(kTeamThreads) : "memory");
}

// The jobs of all blocks: block b takes the jobs b, b + gridDim.x and so on. A job is a work tile. In the last wave,
// which has fewer work tiles than blocks, a job is one split-K part of a work tile.
struct Jobs {
    int items;  // items of all experts
    int count;
    int stages;  // stages of one item of a work tile
    int whole;   // jobs that are whole work tiles
    int rest;    // work tiles of the last wave, which are divided
    int parts;   // split-K parts of each divided work tile

    __device__ __forceinline__ Jobs(const DownParams& p, int items)
        : items(items), stages((p.in_features + kColumns - 1) / kColumns) {
        const int work_tiles = (p.out_features + kRows - 1) / kRows * (kOneToken ? 1 : items);
        const int blocks = gridDim.x;
        rest = kParts > 1 ? work_tiles % blocks : 0;
        parts = rest > 0 ? max(1, min(min(kParts, blocks / rest), stages)) : 1;
        whole = work_tiles - rest;
        count = whole + rest * parts;
    }

    // The same part of neighbouring work tiles is computed by neighbouring blocks, which share reads of W through L2.
    __device__ __forceinline__ int work_tile(int job) const { return job < whole ? job : whole + (job - whole) % rest; }
    __device__ __forceinline__ int parts_of(int job) const { return job < whole ? 1 : parts; }
    __device__ __forceinline__ int part(int job) const { return job < whole ? 0 : (job - whole) / rest; }
    __device__ __forceinline__ int first_stage(int job) const { return stages * part(job) / parts; }
    __device__ __forceinline__ int end_stage(int job) const {
        return job < whole ? stages : stages * (part(job) + 1) / parts;
    }
    __device__ __forceinline__ int items_of_job() const { return kOneToken ? items : 1; }
    __device__ __forceinline__ int item(int job, int index) const { return kOneToken ? index : work_tile(job) % items; }
    __device__ __forceinline__ int tile(int job) const { return kOneToken ? job : work_tile(job) / items; }
    // A last tile that would run past the end starts at an earlier row instead, and computes some rows twice.
    __device__ __forceinline__ int row(const DownParams& p, int job) const {
        return min(tile(job) * kRows, p.out_features - kRows);
    }
};

// Copies the stages of a team, job by job.
class Loader {
    static constexpr int kRowVectors = kRowBytes / 16;
    static constexpr int kRowsAtOnce = kTeamThreads / kRowVectors;
    static constexpr int kCopies = kRows / kRowsAtOnce;
    static constexpr int kTokensAtOnce = kTeamThreads / 16;  // a token's columns are 16 vectors
    static constexpr int kTokenCopies = (kTokens + kTokensAtOnce - 1) / kTokensAtOnce;
    static constexpr int kScaleStep = kScalesColumns<kFormat> ? kScaleElementBytes : 0;  // bytes from stage to stage

    const DownParams& p_;
    const Jobs& jobs_;
    const PairItems& items_;
    int team_, thread_;
    i64 weight_step_;
    u32 weight_offset_, token_offset_;  // offsets in a stage
    int job_, index_ = 0, stage_;       // the next stage, with its job and the index of its item in the job
    int end_ = 0;                       // end of the job's stages
    int count_;                         // pairs of the item
    const u8* weight_;
    const u8* y_[kTokenCopies];
    const u8* scale_;

    __device__ __forceinline__ void start() {
        if (job_ < jobs_.count) stage_ = jobs_.first_stage(job_) + team_, end_ = jobs_.end_stage(job_);
    }

    // If the stage lies past the end of the job, moves to the next item or job. Then computes the item's addresses.
    __device__ __forceinline__ void locate() {
        while (job_ < jobs_.count && stage_ >= end_) {
            stage_ -= jobs_.stages;
            if (++index_ == jobs_.items_of_job()) job_ += gridDim.x, index_ = 0, start();
        }
        if (job_ >= jobs_.count) return;
        const PairRange item = items_[jobs_.item(job_, index_)];
        const int row = jobs_.row(p_, job_);
        count_ = item.count;
        weight_ =
            static_cast<const u8*>(p_.weight) +
            (item.expert * p_.weight_stride + (row + thread_ / kRowVectors) * p_.weight_row_stride) * kElementBytes +
            static_cast<i64>(stage_) * kRowBytes + thread_ % kRowVectors * 16;
#pragma unroll
        for (int i = 0; i < kTokenCopies; ++i) {
            const int token = min(i * kTokensAtOnce + thread_ / 16, item.count - 1);
            y_[i] = static_cast<const u8*>(p_.y) +
                    static_cast<i64>(items_.pair_of(item, token)) * (2 * p_.in_features) +
                    static_cast<i64>(stage_) * kTokenBytes + thread_ % 16 * 16;
        }
        if constexpr (kHasScales)
            scale_ = first_scale(p_, item.expert, row + min(thread_, kRows - 1)) + stage_ * kScaleStep;
    }

  public:
    __device__ __forceinline__ Loader(const DownParams& p, const Jobs& jobs, const PairItems& items, int team,
                                      int thread)
        : p_(p), jobs_(jobs), items_(items), team_(team), thread_(thread), stage_(team) {
        job_ = jobs.items > 0 ? blockIdx.x : jobs.count;
        weight_step_ = p.weight_row_stride * (kElementBytes * kRowsAtOnce);
        const int row = thread / kRowVectors, token = thread / 16;
        weight_offset_ = row * kRowBytes + (thread % kRowVectors * 16 ^ permuted_step(row) * kStepBytes);
        token_offset_ = kTokensAt + token * kTokenBytes + (thread % 16 * 16 ^ token % 4 * kTokenStepBytes);
        start();
        locate();
    }

    __device__ __forceinline__ void load_next(u32 slot) {
        if (job_ < jobs_.count) {
            // Columns past the end become zeros.
            const int columns_left = p_.in_features - stage_ * kColumns;
            const u8* weight = weight_;
#pragma unroll
            for (int i = 0; i < kCopies; ++i) {
                const u32 to = (slot + weight_offset_) ^ permuted_step(i * kRowsAtOnce) * kStepBytes;
                copy_async<16>(to + i * (kRowsAtOnce * kRowBytes), weight,
                               thread_ % kRowVectors * (128 / kBits) < columns_left ? 16 : 0, cache_policy(true));
                weight += weight_step_;
            }
            weight_ += kTeams * kRowBytes;
#pragma unroll
            for (int i = 0; i < kTokenCopies; ++i) {
                const u32 to = (slot + token_offset_) ^ i * kTokensAtOnce % 4 * kTokenStepBytes;
                if (i * kTokensAtOnce + thread_ / 16 < count_)
                    copy_async<16>(to + i * (kTokensAtOnce * kTokenBytes), y_[i],
                                   thread_ % 16 * 8 < columns_left ? 16 : 0, cache_policy(false));
                y_[i] += kTeams * kTokenBytes;
            }
            if constexpr (kHasScales) {
                // cp.async copies at least four aligned bytes, so a 2-byte scale may come with the scale before it.
                const u64 address = reinterpret_cast<u64>(scale_);
                if (thread_ < kRows)
                    copy_async<4>(slot + kScalesAt + 4 * thread_, reinterpret_cast<const void*>(address & ~3ull),
                                  kScaleElementBytes == 2 && address % 4 == 0 ? 2 : 4, cache_policy(false));
                scale_ += kTeams * kScaleStep;
            }
            stage_ += kTeams;
            if (stage_ >= end_) locate();
        }
        copy_async_commit();
    }
};

// The scales of a lane's rows g and g + 8 of each tile, for the columns of a stage.
struct RowScales {
    float scale[kRowTiles][2];
    u32 address_[kRowTiles][2];  // address of the scale in the first stage, in units of 2 bytes

    __device__ __forceinline__ RowScales(const DownParams& p, int expert, int row) {
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                scale[r][half] = 1.0f;
                if constexpr (kScaleElementBytes == 2)
                    address_[r][half] =
                        static_cast<u32>(reinterpret_cast<u64>(first_scale(p, expert, row + 16 * r + 8 * half)) / 2);
            }
    }

    __device__ __forceinline__ void load(u32 address, int stage) {
#pragma unroll
        for (int r = 0; r < (kHasScales ? kRowTiles : 0); ++r)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const u32 word = load_shared_4(address + 4 * (16 * r + 8 * half));
                if constexpr (kScaleElementBytes == 4) scale[r][half] = __uint_as_float(word);
                else
                    scale[r][half] = __uint_as_float((address_[r][half] + stage) % 2 ? word & 0xffff0000u : word << 16);
            }
    }
};

// A lane's sums of an item: rows g and g + 8 of each tile of 16 rows, tokens 2q and 2q + 1 of every 8.
struct Accumulators {
    float sum[kRowTiles][kTokenTiles][4];

    __device__ __forceinline__ void multiply(u32 weights, u32 tokens) {
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            u32 x[kTokenTiles][4];
#pragma unroll
            for (int n = 0; n < kTokenTiles; ++n) {
                u32 word[4];
                load_shared_words(word, (tokens ^ step * kTokenStepBytes) + n * (8 * kTokenBytes));
                Weight::order_octet(x[n], word);
            }
#pragma unroll
            for (int r = 0; r < kRowTiles; ++r) {
                u32 w[2][4];
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    u32 word[kBits / 4];
                    load_shared_words(word, (weights ^ step * kStepBytes) + (16 * r + 8 * half) * kRowBytes);
                    Weight::octet(w[half], word);
                }
#pragma unroll
                for (int k = 0; k < 4; k += 2)
#pragma unroll
                    for (int n = 0; n < kTokenTiles; ++n)
                        mma_16x8x16<kType == kBfloat16>(sum[r][n], {w[0][k], w[1][k], w[0][k + 1], w[1][k + 1]},
                                                        {x[n][k], x[n][k + 1]});
            }
        }
    }

    // Adds the sums of a group of columns, multiplied by the scales of the rows.
    __device__ __forceinline__ void add(const Accumulators& group, const RowScales& scales) {
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
            for (int n = 0; n < kTokenTiles; ++n)
#pragma unroll
                for (int j = 0; j < 4; ++j) sum[r][n][j] += group.sum[r][n][j] * scales.scale[r][j / 2];
    }
};

}  // namespace mglu

extern "C" __global__ void __launch_bounds__(mglu::kThreads, mglu::kBlocksPerSm)
    mglu_experts_down(const __grid_constant__ mglu::DownParams p) {
    using namespace mglu;
    extern __shared__ __align__(256) u8 shared[];
    const int lane = threadIdx.x % 32;
    const int team = threadIdx.x / kTeamThreads;
    const int warp = threadIdx.x % kTeamThreads / 32;  // index in the team
    const int g = lane / 4;
    const int q = lane % 4;
    const int warp_row = warp * (16 * kRowTiles) + g;
    float* sums = reinterpret_cast<float*>(shared + kTeams * kRingBytes);
    u8* parts_of_pairs = static_cast<u8*>(p.out) + static_cast<i64>(4 * kParts) * p.pairs * p.out_features;

    let_next_kernel_start();
    wait_for_earlier_kernels();
    PairItems items(shared + kTeams * kRingBytes + kSumBytes, p.pairs, p.experts);
    items.find(p.expert_ids, p.id_bytes, p.pairs, p.experts);
    const Jobs jobs(p, items.count());

    const u32 ring = shared_address(shared) + team * kRingBytes;
    Loader loader(p, jobs, items, team, threadIdx.x % kTeamThreads);
#pragma unroll
    for (int s = 0; s < kStages - 1; ++s) loader.load_next(ring + s * kStageBytes);

    const u32 weights = warp_row * kRowBytes + permuted_step(g) * kStepBytes + q * kBits;
    const u32 tokens = kTokensAt + (kOneToken ? 0 : g * kTokenBytes + g % 4 * kTokenStepBytes) + q * 16;
    u32 slot = ring, free_slot = ring + (kStages - 1) * kStageBytes;
    for (int job = blockIdx.x; job < jobs.count; job += gridDim.x) {
        const int row = jobs.row(p, job), end = jobs.end_stage(job);
        float total[kRowTiles][2] = {};  // weighted sum of the experts, for one token
        int stage = jobs.first_stage(job) + team;
        for (int index = 0; index < jobs.items_of_job(); ++index, stage -= jobs.stages) {
            if (kTeams > 1 && stage >= end) continue;  // other teams compute all stages of this item
            const PairRange item = items[jobs.item(job, index)];
            const float expert_weight =
                kOneToken ? load_expert_weight<kExpertWeightType>(p.expert_weights, item.first) : 1.0f;
            RowScales scales(p, item.expert, row + warp_row);
            Accumulators acc = {};
            for (; stage < end; stage += kTeams) {
                copy_async_wait<kStages - 2>();  // this thread's copies of the oldest stage have arrived
                wait_for_team(team);             // the team's copies have arrived, and it has read the previous stage
                loader.load_next(free_slot);
                scales.load(slot + kScalesAt + 4 * warp_row, stage);
                if constexpr (kScalesColumns<kFormat>) {
                    Accumulators group = {};
                    group.multiply(slot + weights, slot + tokens);
                    acc.add(group, scales);
                } else {
                    acc.multiply(slot + weights, slot + tokens);
                }
                free_slot = slot;
                slot += kStageBytes;
                if (slot == ring + kRingBytes) slot = ring;
            }
            const int part = jobs.part(job), tiles = (p.out_features + kRows - 1) / kRows, tile = jobs.tile(job);
            if (kParts > 1 && part == 0)
                for (int token = threadIdx.x; token < item.count; token += kThreads)
                    parts_of_pairs[static_cast<i64>(items.pair_of(item, token)) * tiles + tile] = jobs.parts_of(job);
#pragma unroll
            for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
                for (int n = 0; n < kTokenTiles; ++n)
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        const int token = n * 8 + 2 * q + j % 2, own_row = row + warp_row + 16 * r + j / 2 * 8;
                        const float sum = acc.sum[r][n][j] * (kScalesRows<kFormat> ? scales.scale[r][j / 2] : 1.0f);
                        if constexpr (kOneToken) {  // all columns of the MMA have the same sum
                            if (j % 2 == 0) total[r][j / 2] += expert_weight * sum;
                        } else if (token < item.count && own_row >= tile * kRows) {
                            const i64 pair = static_cast<i64>(part) * p.pairs + items.pair_of(item, token);
                            static_cast<float*>(p.out)[pair * p.out_features + own_row] = sum;
                        }
                    }
        }
        if constexpr (kOneToken) {
            __syncthreads();  // the sums of the previous work tile have been read
            if (q == 0)
#pragma unroll
                for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
                    for (int half = 0; half < 2; ++half)
                        sums[team * kRows + warp_row + 16 * r + 8 * half] = total[r][half];
            __syncthreads();
            for (int own = threadIdx.x; own < kRows; own += kThreads) {
                float sum = 0.0f;
#pragma unroll
                for (int t = 0; t < kTeams; ++t) sum += sums[t * kRows + own];
                static_cast<Element<kType>::Bits*>(p.out)[row + own] = from_float<kType>(sum);
            }
        }
    }
}
