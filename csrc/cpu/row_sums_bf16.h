// The sums of one row and a few tokens in bfloat16, with `vdpbf16ps`. Included inside a file's own namespace, after
// vec_avx512.h and mask_words.h.
//
// One instruction adds 32 products to 16 sums; row_sums.h converts, multiplies and adds eight at a time. The weights
// are masked once for all tokens of the pass, with two instructions per mask. Subnormal numbers count as 0.
#include "weight_words.h"
#include "mask_sums_avx512.h"

// The type of x as the kernel reads it.
template <class E>
using Operand = E;

// Copies a row of x of `count` elements, and pads it with zeros to `padded` elements.
inline void write_operands(const BFloat16* from, std::int64_t count, std::int64_t padded, BFloat16* to) {
    for (std::int64_t k = 0; k < padded; ++k) to[k] = k < count ? from[k] : BFloat16{};
}

constexpr int kOctetsPerVec = 4;

template <class E>
constexpr int kOctetsAtOnce = 2 * kOctetsPerVec;

MGLU_INLINE Vec dot(__m512i a, __m512i b, Vec sum) {
    return {_mm512_dpbf16_ps(sum.v, bit_cast<__m512bh>(a), bit_cast<__m512bh>(b))};
}

// One step of the product without masks (linear.h): kLinearStep weights times x, added to `sum`.
constexpr std::int64_t kLinearStep = 8 * kOctetsAtOnce<BFloat16>;
template <class W>
MGLU_INLINE WeightWords load_weights(const W* p) {
    return load_words(p);
}
MGLU_INLINE Vec multiply_add(WeightWords weights, const BFloat16* x, Vec sum) {
    return dot(weights.high, _mm512_loadu_si512(x + 32), dot(weights.low, _mm512_loadu_si512(x), sum));
}

// The sums of one row.
template <class E, class W, int Tokens, int Masks>
struct RowSums : MaskSums<false, Tokens, Masks> {
    using Sums = MaskSums<false, Tokens, Masks>;
    using Sums::kChains;

    const W* weights;
    const std::uint8_t* bits;
    const E* x[Tokens];
    std::int64_t n_masks;

    // Adds the products of the step that begins at octet `first`.
    MGLU_INLINE void add(std::int64_t first) {
        const WeightWords words = load_words(weights + 8 * first);
        add_vec<0>(first, words.low);
        add_vec<kChains - 1>(first + kOctetsPerVec, words.high);
    }

    template <int Chain>
    MGLU_INLINE void add_vec(std::int64_t octet, __m512i w) {
        const MaskWords masks(bits + octet * n_masks, first_bytes(3 * n_masks + Masks), byte_order(n_masks));
        __m512i x_of[Tokens];
        unrolled<Tokens>([&](auto t) MGLU_STEP {
            x_of[t] = _mm512_loadu_si512(x[t] + 8 * octet);
            this->rests[Chain][t][0] = dot(w, x_of[t], this->rests[Chain][t][0]);
        });
        unrolled<Masks>([&](auto i) MGLU_STEP {
            const __m512i masked = masks.apply(i, w);
            unrolled<Tokens>(
                [&](auto t) MGLU_STEP { this->parts[Chain][t][i] = dot(masked, x_of[t], this->parts[Chain][t][i]); });
        });
    }
};
