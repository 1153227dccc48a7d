// Sums of one row for a few tokens. `parts` has one sum per mask, of the products that the mask keeps. `rests` has the
// sums from which values are computed. Included inside a file's own namespace, after vec_avx512.h.

constexpr int vecs_for(int masks) { return (masks + kMasksPerVec - 1) / kMasksPerVec; }

// With `SumsValues`, each mask has a `rests` sum of the products that it drops. Without `SumsValues`, the only sum in
// `rests` is the sum of all products, and a value is this sum minus the gate.
template <bool SumsValues, int Tokens, int Masks>
struct MaskSums {
    static constexpr int kVecs = vecs_for(Masks), kRests = SumsValues ? Masks : 1;
    // Two independent chains of sums hide the latency of an addition. In float32 (`SumsValues`) there is always one
    // chain, so that the number of tokens does not change a result's bits.
    static constexpr int kChains = !SumsValues && 2 * Tokens * (1 + Masks) <= kSumRegisters ? 2 : 1;

    Vec parts[kChains][Tokens][Masks];
    Vec rests[kChains][Tokens][kRests];

    MGLU_INLINE void clear() {
        unrolled<kChains * Tokens>([&](auto i) MGLU_STEP {
            constexpr int c = i / Tokens, t = i % Tokens;
            unrolled<Masks>([&](auto mask) MGLU_STEP { parts[c][t][mask] = broadcast(0.0f); });
            unrolled<kRests>([&](auto mask) MGLU_STEP { rests[c][t][mask] = broadcast(0.0f); });
        });
    }

    // The sum of all chains for token T and mask I, or for the last mask if I is too large.
    template <int T, int I, int Sums>
    MGLU_INLINE static Vec sum(const Vec (&chains)[kChains][Tokens][Sums]) {
        constexpr int i = I < Sums ? I : Sums - 1;
        return kChains == 2 ? chains[0][T][i] + chains[kChains - 1][T][i] : chains[0][T][i];
    }
    // The gates and values of token T and masks 2V and 2V + 1. With an odd number of masks, the last vector holds the
    // last mask twice.
    template <int T, int V>
    MGLU_INLINE Vec gate() const {
        return half_sums(sum<T, 2 * V>(parts), sum<T, 2 * V + 1>(parts));
    }
    template <int T, int V>
    MGLU_INLINE Vec value() const {
        const Vec gates = gate<T, V>(), others = half_sums(sum<T, 2 * V>(rests), sum<T, 2 * V + 1>(rests));
        // A gate that is not finite makes its value NaN, as in the naive layer.
        return SumsValues ? others + (gates - gates) : others - gates;
    }
};
