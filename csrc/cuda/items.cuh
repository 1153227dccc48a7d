// The table of items that group_tokens.cu writes and the kernels of experts read (work.cuh), and the ids of experts.
#pragma once
#include "ptx.cuh"

namespace mglu {

// An entry of the table.
struct alignas(16) ItemEntry {
    int expert;      // -1: these rows belong to no expert, and their result is zeros
    int first;       // the first place
    int count;       // places: 0 where there are fewer items than entries
    u32 neighbours;  // entries of the same expert, and in the upper half how many of them are before this one
};

// The expert of a row, or `experts` for an id out of range.
__device__ __forceinline__ int expert_of(const void* expert_ids, int id_bytes, int row, int experts) {
    if (id_bytes == 4) {
        const u32 id = static_cast<const u32*>(expert_ids)[row];
        return id < experts ? id : experts;
    }
    const u64 id = static_cast<const u64*>(expert_ids)[row];
    return id < experts ? static_cast<int>(id) : experts;
}

}  // namespace mglu
