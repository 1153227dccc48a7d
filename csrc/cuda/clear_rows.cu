// Zeroes the rows of a matrix after the last expert's rows, which torch's grouped_mm does not write. Usually there are
// no such rows, and the kernel only reads one number.
#include "ptx.cuh"

namespace mglu {

struct Params {
    const int* ends;  // [experts]: the end of each expert's rows
    void* out;        // [rows, row_words], contiguous
    i64 experts;
    i64 rows;
    i64 row_words;  // 16-bit words; with MGLU_VECTOR a multiple of 8
    i64 blocks;
};

constexpr int kThreads = 256;
constexpr int kWords = MGLU_VECTOR ? 8 : 1;  // 16-bit words of a store

}  // namespace mglu

extern "C" __global__ void __launch_bounds__(mglu::kThreads) mglu_clear_rows(const __grid_constant__ mglu::Params p) {
    using namespace mglu;
    const int end = p.ends[p.experts - 1];
    const i64 stores = p.row_words / kWords, thread = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
    for (i64 at = (end < 0 ? 0 : end) * stores + thread; at < p.rows * stores; at += p.blocks * kThreads) {
        u16* to = static_cast<u16*>(p.out) + at * kWords;
        if constexpr (kWords == 8) store_global(to, {0, 0, 0, 0});
        else *to = 0;
    }
}
