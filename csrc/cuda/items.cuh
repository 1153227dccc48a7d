// The table of items, which group_tokens.cu writes and the kernels of experts read (work.cuh).
#pragma once
#include "ptx.cuh"

namespace mglu {

// An entry of the table: `count` rows of one expert, which are consecutive in the order sorted by expert.
struct alignas(16) ItemEntry {
    int expert;      // -1 if the rows belong to no expert; the result of such rows is zeros
    int first;       // sorted position of the first row
    int count;       // number of rows; 0 in entries after the last item
    u32 neighbours;  // lower half: number of entries of this expert; upper half: how many of them come before this one
};

// Returns the expert of a row, or `experts` if its id is out of range.
__device__ __forceinline__ int expert_of(const void* expert_ids, int id_bytes, int row, int experts) {
    if (id_bytes == 4) {
        const u32 id = static_cast<const u32*>(expert_ids)[row];
        return id < experts ? id : experts;
    }
    const u64 id = static_cast<const u64*>(expert_ids)[row];
    return id < experts ? static_cast<int>(id) : experts;
}

}  // namespace mglu
