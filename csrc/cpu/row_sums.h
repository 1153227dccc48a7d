// The sums of one row and a few tokens, in float32. Included inside a file's own namespace, after Vec and the mask
// classes (mask_table.h).
//
// `total` is one vector whose lane k sums every eighth product, from product k on. For each mask, `part` sums the
// products under the mask in the same way. The gate is `part` and the value is `total - part`.
//
// In 16-bit types this difference is exact enough, because small_values.h sums small values again. In float32 the error
// of `total` would enter the values of all masks. So in float32 the kernel subtracts after every 16 columns, and adds
// the differences to sums of their own, the values. This takes 4.5 instead of 3 instructions for each mask and 8
// columns, and values are as exact as the naive layer's separate products unless x or W has outliers.
#include "operands.h"

template <class W>
MGLU_INLINE Vec load_weights(const W* p) {
    return load_octet(p);
}

constexpr int vecs_for(int masks) { return (masks + kMasksPerVec - 1) / kMasksPerVec; }

// The number of independent chains of sums, which take turns every 8 columns to hide the latency of an addition. The
// registers limit this number. Taking turns between several rows instead would share loads of x, but the hardware's
// prefetcher follows the weights of one row better than those of four.
template <class E>
constexpr int chains_for(int masks, int tokens) {
    const int sums = tokens * (1 + vecs_for(masks));
    return kSumsValues<E> ? 1 : 4 * sums <= kSumRegisters ? 4 : 2 * sums <= kSumRegisters ? 2 : 1;
}

// The sums of one row. E is the type of x, W the type of the weights.
template <class E, class W, int Tokens, int Masks>
struct RowSums {
    static constexpr int kVecs = vecs_for(Masks), kChains = chains_for<E>(Masks, Tokens), kOctets = kOctetsAtOnce<E>;
    static constexpr int kValues = kSumsValues<E> ? kVecs : 1;

    const W* weights;
    const std::uint8_t* bits;
    const float* x[Tokens];
    std::int64_t n_masks;
    Vec gates[kChains][Tokens][kVecs];     // the gate of each mask: `part`
    Vec values[kChains][Tokens][kValues];  // the value of each mask in float32; `total` in 16-bit types

    MGLU_INLINE void clear() {
        for (int c = 0; c < kChains; ++c) {
            for (int t = 0; t < Tokens; ++t) {
                for (Vec& sum : gates[c][t]) sum = broadcast(0.0f);
                for (Vec& sum : values[c][t]) sum = broadcast(0.0f);
            }
        }
    }

    // Adds the products of the step that begins at octet `first`.
    MGLU_INLINE void add(std::int64_t first) {
        if constexpr (kSumsValues<E>) {
            add_to_values(first);
        } else {
            add_to_parts(first);
        }
    }

    // The loop over masks is inside the loop over octets, so that all sums stay in registers.
    MGLU_INLINE void add_to_parts(std::int64_t first) {
#pragma GCC unroll 4
        for (int o = 0; o < kOctets; ++o) {
            const int c = o % kChains;
            const Vec w = load_octet(weights + 8 * (first + o));
            const RowMasks<Masks> masks(bits + (first + o) * n_masks);
#pragma GCC unroll 2
            for (int t = 0; t < Tokens; ++t) {
                const Vec product = w * load_octet(x[t] + 8 * (first + o));
                values[c][t][0] = values[c][t][0] + product;
#pragma GCC unroll 8
                for (int v = 0; v < kVecs; ++v) gates[c][t][v] = masks.add(v, gates[c][t][v], product);
            }
        }
    }

    // The loop over octets is inside the loop over masks. `part` and `total` sum only this step, in the same order, so
    // that a mask of ones gives the value 0 exactly.
    MGLU_INLINE void add_to_values(std::int64_t first) {
#pragma GCC unroll 2
        for (int t = 0; t < Tokens; ++t) {
            Vec products[kOctets], total = broadcast(0.0f);
#pragma GCC unroll 4
            for (int o = 0; o < kOctets; ++o) {
                products[o] = load_octet(weights + 8 * (first + o)) * load_octet(x[t] + 8 * (first + o));
                total = o == 0 ? products[o] : total + products[o];
            }
#pragma GCC unroll 8
            for (int v = 0; v < kVecs; ++v) {
                Vec part = broadcast(0.0f);
#pragma GCC unroll 4
                for (int o = 0; o < kOctets; ++o) {
                    part = StepMasks<Masks>(bits + (first + o) * n_masks).add(v, part, products[o]);
                }
                gates[0][t][v] = gates[0][t][v] + part;
                values[0][t][v] = values[0][t][v] + (total - part);
            }
        }
    }

    // gate() and value() return the sums of token T for the masks of vector V.
    template <int T, int V>
    MGLU_INLINE Vec gate() const {
        Vec sum = gates[0][T][V];
        unrolled<kChains - 1>([&](auto c) MGLU_STEP { sum = sum + gates[c + 1][T][V]; });
        return kSumsValues<E> ? sum : RowMasks<Masks>::finished_sum(V, sum);
    }
    template <int T, int V>
    MGLU_INLINE Vec value() const {
        if constexpr (kSumsValues<E>) {
            return values[0][T][V];
        } else {
            Vec total = values[0][T][0];
            unrolled<kChains - 1>([&](auto c) MGLU_STEP { total = total + values[c + 1][T][0]; });
            return total - gate<T, V>();
        }
    }
};
