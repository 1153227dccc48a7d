// Sorts the rows of a call by expert, and divides each expert's rows into items (work.cuh), in one block.
//
// With expert ids, this is a stable counting sort. Each warp counts the experts of a range of rows. Prefix sums of the
// counts, over warps and then over experts, give the sorted position of the first row of each warp and expert. With
// MGLU_SORTED the rows are sorted already, and instead of ids the kernel gets `offs`, the end of each expert's rows.
// Rows without an expert form the last group.
//
// With MGLU_ORDER the kernel writes no items. It writes the order of rows, for torch's grouped_mm, which needs sorted
// rows: first the rows in sorted order, then the sorted position of each row, both int64 [rows], and then the end of
// each expert's rows, int32 [experts].
#include "items.cuh"
#include "params.cuh"
#include "ptx.cuh"

namespace mglu {

constexpr bool kSorted = MGLU_SORTED;  // the kernel gets `offs` instead of expert ids
#if defined(MGLU_ORDER) && MGLU_ORDER
constexpr bool kOrder = true;
#else
constexpr bool kOrder = false;
#endif
static_assert(!kOrder || !kSorted, "sorted rows are in order");
constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kBatch = 4;  // rows that a lane reads together

// Computes an inclusive prefix sum in place, or a scan with another associative operation. One warp calls this.
template <typename Operation>
__device__ __forceinline__ void scan(int* values, int count, Operation operation) {
    const int lane = threadIdx.x % 32, each = (count + 31) / 32;
    const int first = min(lane * each, count), end = min(first + each, count);
    int total = 0;
    for (int i = first; i < end; ++i) total = values[i] = operation(total, values[i]);
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const int other = __shfl_up_sync(~0u, total, distance);
        if (lane >= distance) total = operation(total, other);
    }
    const int before = __shfl_up_sync(~0u, total, 1);
    if (lane > 0)
        for (int i = first; i < end; ++i) values[i] = operation(before, values[i]);
}

// Returns the lanes that hold the same number as this lane. Numbers have up to 11 bits. This takes one ballot per bit,
// while match.any would take one step for each distinct number.
__device__ __forceinline__ u32 lanes_with(int number) {
    u32 same = ~0u;
#pragma unroll
    for (int bit = 0; bit < 11; ++bit) {
        const u32 own = number >> bit & 1;
        same &= ~(__ballot_sync(~0u, own) ^ -own);  // keep the lanes that agree with this one in the bit
    }
    return same;
}

__device__ __forceinline__ int before(const int* ends, int group) { return group > 0 ? ends[group - 1] : 0; }

}  // namespace mglu

extern "C" __global__ void __launch_bounds__(mglu::kThreads, 1)
    mglu_group_tokens(const __grid_constant__ mglu::GroupParams p) {
    using namespace mglu;
    extern __shared__ int shared[];
    const auto sum = [](int a, int b) { return a + b; };
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int groups = p.experts + 1;
    int* ends = shared;                // the sorted position at which each group ends
    int* item_ends = ends + groups;    // the entry of the table at which each group ends
    int* counts = item_ends + groups;  // [kWarps][groups]: number of rows, later the position of a warp's first row
    int* own = counts + warp * groups;
    // The rows that this warp counts.
    const int range = ((p.rows + kWarps - 1) / kWarps + 31) / 32 * 32;
    const int first = min(warp * range, p.rows), end = min(first + range, p.rows);
    const int warps = (p.rows + range - 1) / max(range, 1);

    // The groups of the kBatch rows that a lane reads together.
    struct Batch {
        int group[kBatch];
    };
    const auto read = [&](int base) {
        Batch batch;
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const int row = base + 32 * i + lane;
            batch.group[i] = row < end ? expert_of(p.expert_ids, p.id_bytes, row, p.experts) : groups;
        }
        return batch;
    };

    let_next_kernel_start();
    if constexpr (!kSorted)
        for (int i = threadIdx.x; i < warps * groups; i += kThreads) counts[i] = 0;
    wait_for_earlier_kernels();
    if constexpr (kSorted) {
        // Clamp the ends and make them ascend, so that every row belongs to exactly one group.
        for (int g = threadIdx.x; g < groups; g += kThreads)
            ends[g] = g < p.experts ? max(0, min(static_cast<const int*>(p.expert_ids)[g], p.rows)) : p.rows;
        __syncthreads();
        if (warp == 0) scan(ends, groups, [](int a, int b) { return max(a, b); });
        __syncthreads();
        for (int g = threadIdx.x; g < groups; g += kThreads)
            item_ends[g] = (ends[g] - before(ends, g) + p.item_rows - 1) / p.item_rows;
    } else {
        Batch batch = read(first);  // starts before the barrier, since reading takes longest
        __syncthreads();
        for (int base = first; base < end; base += 32 * kBatch) {
            if (base > first) batch = read(base);
#pragma unroll
            for (int i = 0; i < kBatch; ++i)
                if (batch.group[i] < groups) atomicAdd(own + batch.group[i], 1);
        }
        __syncthreads();
        for (int g = threadIdx.x; g < groups; g += kThreads) {
            int count[kWarps], total = 0;
#pragma unroll
            for (int w = 0; w < kWarps; ++w) count[w] = w < warps ? counts[w * groups + g] : 0;
#pragma unroll
            for (int w = 0; w < kWarps; ++w) {
                if (w < warps) counts[w * groups + g] = total;
                total += count[w];
            }
            ends[g] = total;
            item_ends[g] = (total + p.item_rows - 1) / p.item_rows;
        }
        __syncthreads();
        if (warp == 1) scan(ends, groups, sum);
    }
    if constexpr (kSorted) __syncthreads();
    if (warp == 0) scan(item_ends, groups, sum);
    __syncthreads();

    if constexpr (!kSorted) {
        int* rows = p.out + 4 * p.max_items;
        i64* order = reinterpret_cast<i64*>(p.out);
        for (int base = first; base < end; base += 32 * kBatch) {
            const Batch batch = read(base);
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                const int group = batch.group[i];
                const u32 same = lanes_with(group);
                const int earlier = __popc(same & ((1u << lane) - 1));
                if (group < groups) {
                    const int row = base + 32 * i + lane, position = before(ends, group) + own[group] + earlier;
                    if constexpr (kOrder) order[position] = row, order[p.rows + row] = position;
                    else rows[position] = row;
                }
                __syncwarp();
                if (group < groups && earlier == 0) own[group] += __popc(same);
                __syncwarp();
            }
        }
    }
    if constexpr (kOrder) {
        for (int g = threadIdx.x; g < p.experts; g += kThreads) p.out[4 * p.rows + g] = ends[g];
        return;
    }
    for (int i = threadIdx.x; i < p.max_items; i += kThreads) {
        ItemEntry entry = {-1, 0, 0, 1};
        if (i < item_ends[groups - 1]) {
            int group = 0;  // the first group whose entries end after i
            for (int step = 1024; step > 0; step /= 2)
                if (group + step <= groups && item_ends[group + step - 1] <= i) group += step;
            const int first_entry = before(item_ends, group), count = item_ends[group] - first_entry;
            entry.expert = group < p.experts ? group : -1;
            entry.first = before(ends, group) + (i - first_entry) * p.item_rows;
            entry.count = min(p.item_rows, ends[group] - entry.first);
            if (count < 65536) entry.neighbours = static_cast<u32>(i - first_entry) << 16 | count;
        }
        reinterpret_cast<ItemEntry*>(p.out)[i] = entry;
    }
}
