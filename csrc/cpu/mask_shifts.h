// The masks of eight weights by AVX2. Included inside a file's own namespace, below mask_table.h.
//
// By the table, a mask takes two loads, a shift and an FMA. By shifts it takes other units: the bytes of four masks are
// a word in every lane, lane k's bit goes to bit 30, and what an `and` leaves of it is 2.0 or 0, a factor again. Half
// of the masks each way is the fastest: an octet of four masks takes 4.6 cycles on Zen 3, against 4.95 all by table.

template <int Masks>
struct MixedMasks {
    static constexpr int kWords = Masks / 4;
    const std::uint8_t* bits;
    __m256i words[kWords + 1];

    MGLU_INLINE explicit MixedMasks(const std::uint8_t* of_octet) : bits(of_octet) {
#pragma GCC unroll 2
        for (int i = 0; i < kWords; ++i) {
            std::int32_t word;
            __builtin_memcpy(&word, of_octet + 4 * i, sizeof(word));
            words[i] = _mm256_set1_epi32(word);
        }
    }

    MGLU_INLINE static bool is_shifted(int v) { return v / 4 < kWords && v % 2 == 0; }

    // sum + (the products under mask v), or under a shifted mask, twice those.
    MGLU_INLINE Vec add(int v, Vec sum, Vec product) const {
        if (!is_shifted(v)) return fma(product, load_mask<1>(bits + v, 0), sum);
        const __m256i to_bit_30 = v % 4 == 0 ? _mm256_setr_epi32(30, 29, 28, 27, 26, 25, 24, 23)
                                             : _mm256_setr_epi32(14, 13, 12, 11, 10, 9, 8, 7);
        const __m256 shifted = _mm256_castsi256_ps(_mm256_sllv_epi32(words[v / 4], to_bit_30));
        return fma(product, Vec{_mm256_and_ps(shifted, _mm256_set1_ps(2.0f))}, sum);
    }
    // The sum that `add` has made; halving is exact.
    MGLU_INLINE static Vec sum_of(int v, Vec sum) { return is_shifted(v) ? sum * broadcast(0.5f) : sum; }
};
