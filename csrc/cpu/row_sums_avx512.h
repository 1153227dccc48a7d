// The sums of one row and a few tokens, in float32, by vectors of 16 columns. Included inside a file's own namespace,
// after vec_avx512.h.
//
// A vector of products is added to the total, and to the sum of each mask under that mask, which is in a k-register. In
// float32 the error of the total would enter the values of all masks. So in float32 there is no total, and each mask
// has a second sum, of the products that it drops.
#include "operands.h"
#include "mask_sums_avx512.h"

template <class W>
MGLU_INLINE Vec load_weights(const W* p) {
    return load_16(p);
}

// One mask of 16 columns. Its two bytes, of 8 columns each, are n_masks apart.
MGLU_INLINE Mask load_mask_of_16(const std::uint8_t* bits, std::int64_t n_masks) {
    return static_cast<Mask>(bits[0] | bits[n_masks] << 8);
}

// The sums of one row. E is the type of x, W the type of the weights.
template <class E, class W, int Tokens, int Masks>
struct RowSums : MaskSums<kSumsValues<E>, Tokens, Masks> {
    using Sums = MaskSums<kSumsValues<E>, Tokens, Masks>;
    using Sums::kChains;
    static constexpr int kSteps = kOctetsAtOnce<E> / 2;

    const W* weights;
    const std::uint8_t* bits;
    const float* x[Tokens];
    std::int64_t n_masks;

    // Adds the products of the step that begins at octet `first`.
    MGLU_INLINE void add(std::int64_t first) {
        unrolled<kSteps>([&](auto step) MGLU_STEP {
            constexpr int c = step % kChains;
            const std::int64_t octet = first + 2 * step;
            const Vec w = load_16(weights + 8 * octet);
            Mask masks[Masks];
            unrolled<Masks>([&](auto i) MGLU_STEP { masks[i] = load_mask_of_16(bits + octet * n_masks + i, n_masks); });
            unrolled<Tokens>([&](auto t) MGLU_STEP {
                const Vec x_octets = load(x[t] + 8 * octet), product = w * x_octets;
                if constexpr (!kSumsValues<E>) this->rests[c][t][0] = this->rests[c][t][0] + product;
                unrolled<Masks>([&](auto i) MGLU_STEP {
                    // Products of 16-bit types are exact, so FMA gives the same bits as a multiplication and an
                    // addition.
                    if constexpr (kSumsValues<E> || i % 2 == 0) {
                        this->parts[c][t][i] = {
                            _mm512_mask3_fmadd_ps(w.v, x_octets.v, this->parts[c][t][i].v, masks[i])};
                    } else {
                        this->parts[c][t][i] = add_under(masks[i], this->parts[c][t][i], product);
                    }
                    if constexpr (kSumsValues<E>) {
                        this->rests[c][t][i] = add_under(static_cast<Mask>(~masks[i]), this->rests[c][t][i], product);
                    }
                });
            });
        });
    }
};
