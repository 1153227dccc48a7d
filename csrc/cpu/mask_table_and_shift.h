// Masks with AVX2, half of them from the table and half by shifts. Included inside a file's own namespace, after
// mask_table.h.
//
// A mask from the table takes two loads, a shift and an FMA. Shifts use other execution units: every lane holds the
// bytes of four masks in one word, lane k shifts its bit to bit 30, and an `and` leaves the factor 2.0 or 0. It is
// fastest to apply half of the masks from the table and half by shifts: on Zen 3, 8 columns and four masks take 4.6
// cycles, against 4.95 with the table alone.

template <int Masks>
struct MixedMasks {
    static constexpr int kWords = Masks / 4;
    const std::uint8_t* bits;
    __m256i words[kWords + 1];

    MGLU_INLINE explicit MixedMasks(const std::uint8_t* octet_bits) : bits(octet_bits) {
#pragma GCC unroll 2
        for (int i = 0; i < kWords; ++i) {
            std::int32_t word;
            __builtin_memcpy(&word, octet_bits + 4 * i, sizeof(word));
            words[i] = _mm256_set1_epi32(word);
        }
    }

    MGLU_INLINE static bool is_shifted(int v) { return v / 4 < kWords && v % 2 == 0; }

    // Adds the products that mask v keeps to `sum`. If the mask is applied by a shift, it adds twice the products.
    MGLU_INLINE Vec add(int v, Vec sum, Vec product) const {
        if (!is_shifted(v)) return fma(product, load_mask<1>(bits + v, 0), sum);
        const __m256i to_bit_30 = v % 4 == 0 ? _mm256_setr_epi32(30, 29, 28, 27, 26, 25, 24, 23)
                                             : _mm256_setr_epi32(14, 13, 12, 11, 10, 9, 8, 7);
        const __m256 shifted = _mm256_castsi256_ps(_mm256_sllv_epi32(words[v / 4], to_bit_30));
        return fma(product, Vec{_mm256_and_ps(shifted, _mm256_set1_ps(2.0f))}, sum);
    }
    // Returns the sum of mask v, given its accumulator. Halving is exact.
    MGLU_INLINE static Vec finished_sum(int v, Vec sum) { return is_shifted(v) ? sum * broadcast(0.5f) : sum; }
};
