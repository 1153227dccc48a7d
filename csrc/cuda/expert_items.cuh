// Groups the (token, expert) pairs of a call by expert. Each block does this in shared memory, from the expert ids.
#pragma once
#include "element.cuh"
#include "ptx.cuh"
#include "work.cuh"

namespace mglu {

template <int kExpertWeightType>
__device__ __forceinline__ float load_expert_weight(const void* expert_weights, int pair) {
    using Bits = typename Element<kExpertWeightType>::Bits;
    return to_float<kExpertWeightType>(static_cast<const Bits*>(expert_weights)[pair]);
}

// An item: up to kTokens pairs of one expert. The item's pairs are the `count` sorted pairs from `first` on; if kTokens
// == 1, the item is the pair `first`.
struct PairRange {
    int expert;
    u16 first;
    u16 count;
};

// The items of all pairs whose expert id is in range. For one token, each pair is an item, in order. Otherwise pairs
// are sorted by expert and then by number, so that all blocks find the same items.
template <int kTokens, int kWarps>
class ExpertItems {
    static constexpr int kSortingWarps = kWarps < 4 ? kWarps : 4;

    int* count_;
    int* next_;         // [kSortingWarps][experts]: number of a warp's pairs of an expert, later position of the next
    PairRange* items_;  // [min(pairs, pairs / kTokens + experts)]
    u16* sorted_;       // [pairs], the pairs sorted by expert

  public:
    __device__ __forceinline__ ExpertItems(u8* memory, int pairs, int experts) {
        items_ = reinterpret_cast<PairRange*>(memory);
        next_ = reinterpret_cast<int*>(items_ + min(pairs, pairs / kTokens + experts));
        count_ = next_ + (kTokens == 1 ? 0 : kSortingWarps * experts);
        sorted_ = reinterpret_cast<u16*>(count_ + 1);
    }

    __device__ __forceinline__ int count() const { return *count_; }
    __device__ __forceinline__ PairRange operator[](int index) const { return items_[index]; }
    __device__ __forceinline__ int pair_of(const PairRange& item, int token) const {
        return kTokens == 1 ? item.first : sorted_[item.first + token];
    }

    // All threads of the block call this.
    __device__ __forceinline__ void find(const void* expert_ids, int id_bytes, int pairs, int experts) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const u32 before = (1u << lane) - 1;
        if constexpr (kTokens == 1) {
            int found = 0;
            for (int first = 0; warp == 0 && first < pairs; first += 32) {
                const int pair = first + lane;
                const int expert = pair < pairs ? expert_of(expert_ids, id_bytes, pair, experts) : experts;
                const u32 with_expert = __ballot_sync(~0u, expert < experts);
                if (expert < experts)
                    items_[found + __popc(with_expert & before)] = {expert, static_cast<u16>(pair), 1};
                found += __popc(with_expert);
            }
            if (threadIdx.x == 0) *count_ = found;
        } else {
            for (int i = threadIdx.x; i < kSortingWarps * experts; i += 32 * kWarps) next_[i] = 0;
            __syncthreads();
            int* next = next_ + warp * experts;
            const int share = (pairs + 32 * kSortingWarps - 1) / (32 * kSortingWarps) * 32;
            const int begin = warp < kSortingWarps ? warp * share : pairs, end = min(begin + share, pairs);
            for (int pair = begin + lane; pair < end; pair += 32) {
                const int expert = expert_of(expert_ids, id_bytes, pair, experts);
                if (expert < experts) atomicAdd(next + expert, 1);
            }
            __syncthreads();
            if (warp == 0) divide(experts, lane);
            __syncthreads();
            for (int first = begin; first < end; first += 32) {
                const int pair = first + lane;
                const int expert = pair < end ? expert_of(expert_ids, id_bytes, pair, experts) : experts;
                const u32 same = __match_any_sync(~0u, expert);
                const int position = expert < experts ? next[expert] : 0;
                __syncwarp();
                if (expert < experts) {
                    sorted_[position + __popc(same & before)] = static_cast<u16>(pair);
                    if ((same & before) == 0) next[expert] = position + __popc(same);
                }
                __syncwarp();
            }
        }
        __syncthreads();
    }

  private:
    // Divides the pairs of each expert into items. Each lane takes a range of experts. One prefix sum counts both items
    // and pairs: the upper half of a word is a number of items, and the lower half is a number of pairs.
    __device__ __forceinline__ void divide(int experts, int lane) {
        const int share = (experts + 31) / 32;
        const int begin = min(lane * share, experts), end = min(begin + share, experts);
        u32 own = 0;
        for (int expert = begin; expert < end; ++expert) own += both(pairs_of(expert, experts));
        u32 sum = own;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const u32 lower = __shfl_up_sync(~0u, sum, distance);
            if (lane >= distance) sum += lower;
        }
        if (lane == 31) *count_ = sum >> 16;
        u32 position = sum - own;
        for (int expert = begin; expert < end; ++expert) {
            const int pairs = pairs_of(expert, experts);
            int first = position & 0xffff;
            PairRange* item = items_ + (position >> 16);
            for (int done = 0; done < pairs; done += kTokens)
                *item++ = {expert, static_cast<u16>(first + done), static_cast<u16>(min(pairs - done, kTokens))};
            position += both(pairs);
#pragma unroll
            for (int warp = 0; warp < kSortingWarps; ++warp) {
                int& next = next_[warp * experts + expert];
                const int warp_pairs = next;
                next = first;
                first += warp_pairs;
            }
        }
    }
    __device__ __forceinline__ int pairs_of(int expert, int experts) const {
        int sum = 0;
#pragma unroll
        for (int warp = 0; warp < kSortingWarps; ++warp) sum += next_[warp * experts + expert];
        return sum;
    }
    static __device__ __forceinline__ u32 both(int pairs) {
        return static_cast<u32>((pairs + kTokens - 1) / kTokens) << 16 | pairs;
    }
};

}  // namespace mglu
