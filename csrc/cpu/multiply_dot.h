// Multiplies tiles with `vdpbf16ps`. The interface is the same as in multiply_amx.h. Included inside a file's own
// namespace, after terms.h.
//
// One instruction multiplies two neighbouring weights with the same two columns of x, for 16 tokens, and adds the
// products to the sums of one feature and 16 tokens. The sums of kRows features stay in registers for a whole k-block.
#include "tiles.h"

struct Tiles {};  // nothing to configure

constexpr int kRows = 8;  // features; with 32 tokens they have 16 vectors of sums, which hide the latency of additions

// sums [32 features][16 * Vecs tokens] += weights [steps][2 tiles] * x [steps][Vecs tiles]. With `first`, sums are
// overwritten.
template <int Vecs>
void multiply(const float* weights, std::int64_t steps, const float* x, float* sums, bool first) {
    for (int f = 0; f < kGroupFeatures; f += kRows) {
        Vec sum[kRows][Vecs];
        float* to = sums + f * 16 * Vecs;
        unrolled<kRows * Vecs>(
            [&](auto i) MGLU_STEP { sum[i / Vecs][i % Vecs] = first ? broadcast(0.0f) : load(to + i * 16); });
        const float* rows = weights + f / 16 * kSpacedTile + f % 16 * 16;
        const float* pairs = x;
        for (std::int64_t step = 0; step < steps; ++step, rows += 2 * kSpacedTile, pairs += Vecs * kTile) {
            for (int pair = 0; pair < 16; ++pair) {
                __m512bh panel[Vecs];
                unrolled<Vecs>([&](auto v) MGLU_STEP {
                    panel[v] = bit_cast<__m512bh>(_mm512_loadu_si512(pairs + v * kTile + pair * 16));
                });
                unrolled<kRows>([&](auto r) MGLU_STEP {
                    const auto weight = bit_cast<__m512bh>(_mm512_set1_ps(rows[r * 16 + pair]));
                    unrolled<Vecs>([&](auto v)
                                       MGLU_STEP { sum[r][v] = {_mm512_dpbf16_ps(sum[r][v].v, weight, panel[v])}; });
                });
            }
        }
        unrolled<kRows * Vecs>([&](auto i) MGLU_STEP { store(to + i * 16, sum[i / Vecs][i % Vecs]); });
    }
}
