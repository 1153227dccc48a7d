// The rows of experts: the loop that CPU kernels over experts share.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <utility>

#include "mglu_cpu.h"

namespace mglu::cpu {

// The rows of the result, sorted by expert. The rows of expert e are rows[ends[e - 1]] to rows[ends[e] - 1], in
// ascending order. Rows without an expert are in none of these ranges.
struct SortedRows {
    std::unique_ptr<std::int64_t[]> ends, rows;

    explicit operator bool() const { return ends && rows; }
};

// Sorts the rows of a call. The result is false if there is no memory. Offsets are clamped to [0, rows], and an offset
// below the one before it counts as that one. An id that is not in [0, experts) names no expert.
inline SortedRows sort_rows(const Experts& call) {
    const auto index = [&](std::int64_t i) {
        return call.index_bytes == 4 ? static_cast<const std::int32_t*>(call.index)[i]
                                     : static_cast<const std::int64_t*>(call.index)[i];
    };
    const auto allocate = [](std::int64_t count) {
        return std::unique_ptr<std::int64_t[]>(new (std::nothrow) std::int64_t[static_cast<std::size_t>(count)]());
    };
    SortedRows sorted{allocate(call.experts), allocate(call.rows)};
    if (!sorted) return sorted;
    std::int64_t* const ends = sorted.ends.get();
    if (call.is_sorted) {
        for (std::int64_t row = 0; row < call.rows; ++row) sorted.rows[row] = row;
        for (std::int64_t e = 0, last = 0; e < call.experts; ++e)
            ends[e] = last = std::max(last, std::clamp<std::int64_t>(index(e), 0, call.rows));
        return sorted;
    }
    const auto has_expert = [&](std::int64_t row) { return index(row) >= 0 && index(row) < call.experts; };
    for (std::int64_t row = 0; row < call.rows; ++row)
        if (has_expert(row)) ++ends[index(row)];
    // First ends[e] becomes the start of expert e's rows. Each row that is written moves it towards their end.
    std::int64_t start = 0;
    for (std::int64_t e = 0; e < call.experts; ++e) start += std::exchange(ends[e], start);
    for (std::int64_t row = 0; row < call.rows; ++row)
        if (has_expert(row) && ends[index(row)] < call.rows)  // more only if another thread has changed the ids
            sorted.rows[ends[index(row)]++] = row;
    return sorted;
}

// Calls `body(expert, rows, count)` for each expert that has rows, until it returns another status than ok.
template <typename Body>
Status for_each_expert(const Experts& call, const Body& body) {
    const SortedRows sorted = sort_rows(call);
    if (!sorted) return Status::out_of_memory;
    for (std::int64_t e = 0, first = 0; e < call.experts; first = sorted.ends[e++]) {
        const std::int64_t count = sorted.ends[e] - first;
        const Status status = count > 0 ? body(e, sorted.rows.get() + first, count) : Status::ok;
        if (status != Status::ok) return status;
    }
    return Status::ok;
}

}  // namespace mglu::cpu
