// The sums of one row under each mask and of the rest, for a few tokens. Included inside a file's own namespace, after
// vec_avx512.h.

constexpr int vecs_for(int masks) { return (masks + kMasksPerVec - 1) / kMasksPerVec; }

// `SumsValues`: whether the products that a mask leaves out have a sum of their own. Otherwise one rest is the total.
template <bool SumsValues, int Tokens, int Masks>
struct MaskSums {
    static constexpr int kVecs = vecs_for(Masks), kRests = SumsValues ? Masks : 1;
    // Independent chains of sums hide the latency of an addition. In float32 the number of tokens must not change bits.
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

    // A sum over the chains. Where I is past the last mask, it is the last mask's.
    template <int T, int I, int Sums>
    MGLU_INLINE static Vec sum(const Vec (&of)[kChains][Tokens][Sums]) {
        constexpr int i = I < Sums ? I : Sums - 1;
        return kChains == 2 ? of[0][T][i] + of[kChains - 1][T][i] : of[0][T][i];
    }
    // The gates and values of token T and the masks of vector V. The last vector of an odd number of masks repeats one.
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
