// The sums of one row and a few tokens, in float32, by vectors of 16 columns. Included inside a file's own namespace,
// after vec_avx512.h and operands.h.
//
// A vector of products is summed once for the total, and once for each mask, by a k-register. In float32 the error of a
// total would enter the values of all masks, so the products that a mask leaves out have a sum of their own.

// The masks of 16 columns: a byte of each 8 columns, `n_masks` apart.
MGLU_INLINE Mask load_mask_of_16(const std::uint8_t* bits, std::int64_t n_masks) {
    return static_cast<Mask>(bits[0] | bits[n_masks] << 8);
}

// The sums of one row. E is the type of x, W that of the weights.
template <class E, class W, int Tokens, int Masks>
struct RowSums {
    static constexpr int kVecs = vecs_for(Masks), kSteps = kOctetsAtOnce<E> / 2;
    static constexpr int kRests = kSumsValues<E> ? Masks : 1;
    // Independent chains of sums hide the latency of an addition. In float32 the number of tokens must not change bits.
    static constexpr int kChains = !kSumsValues<E> && 2 * Tokens * (1 + Masks) <= kSumRegisters ? 2 : 1;

    const W* weights;
    const std::uint8_t* bits;
    const float* x[Tokens];
    std::int64_t n_masks;
    Vec parts[kChains][Tokens][Masks];
    Vec rests[kChains][Tokens][kRests];  // in 16-bit types: the total

    MGLU_INLINE void clear() {
        unrolled<kChains * Tokens>([&](auto i) MGLU_STEP {
            constexpr int c = i / Tokens, t = i % Tokens;
            unrolled<Masks>([&](auto mask) MGLU_STEP { parts[c][t][mask] = broadcast(0.0f); });
            unrolled<kRests>([&](auto mask) MGLU_STEP { rests[c][t][mask] = broadcast(0.0f); });
        });
    }

    // Adds the products of a step.
    MGLU_INLINE void add(std::int64_t first) {
        unrolled<kSteps>([&](auto step) MGLU_STEP {
            constexpr int c = step % kChains;
            const std::int64_t octet = first + 2 * step;
            const Vec w = load_16(weights + 8 * octet);
            Mask masks[Masks];
            unrolled<Masks>([&](auto i) MGLU_STEP { masks[i] = load_mask_of_16(bits + octet * n_masks + i, n_masks); });
            unrolled<Tokens>([&](auto t) MGLU_STEP {
                const Vec of_x = load(x[t] + 8 * octet), product = w * of_x;
                if constexpr (!kSumsValues<E>) rests[c][t][0] = rests[c][t][0] + product;
                unrolled<Masks>([&](auto i) MGLU_STEP {
                    // Products of 16-bit types are exact, so FMA gives the same bits.
                    if constexpr (kSumsValues<E> || i % 2 == 0) {
                        parts[c][t][i] = {_mm512_mask3_fmadd_ps(w.v, of_x.v, parts[c][t][i].v, masks[i])};
                    } else {
                        parts[c][t][i] = add_under(masks[i], parts[c][t][i], product);
                    }
                    if constexpr (kSumsValues<E>) {
                        rests[c][t][i] = add_under(static_cast<Mask>(~masks[i]), rests[c][t][i], product);
                    }
                });
            });
        });
    }

    template <int T, int I>
    MGLU_INLINE Vec part() const {
        return kChains == 2 ? parts[0][T][I] + parts[kChains - 1][T][I] : parts[0][T][I];
    }
    template <int T, int I>
    MGLU_INLINE Vec rest() const {
        return kChains == 2 ? rests[0][T][I] + rests[kChains - 1][T][I] : rests[0][T][I];
    }
    // The gates and values of token T and the masks of vector V. The last vector of an odd number of masks repeats one.
    template <int T, int V>
    MGLU_INLINE Vec gate() const {
        return half_sums(part<T, 2 * V>(), part<T, 2 * V + 1 < Masks ? 2 * V + 1 : 2 * V>());
    }
    template <int T, int V>
    MGLU_INLINE Vec value() const {
        const Vec gates = gate<T, V>();
        if constexpr (kSumsValues<E>) {  // a gate that is not finite makes its value NaN, as in the naive layer
            return half_sums(rest<T, 2 * V>(), rest<T, 2 * V + 1 < Masks ? 2 * V + 1 : 2 * V>()) + (gates - gates);
        } else {
            return half_sums(rest<T, 0>(), rest<T, 0>()) - gates;
        }
    }
};
