// Eight floats in a 256-bit register. Included inside a file's own namespace, below the target pragma.

#include "unrolled.h"
#include "element.h"

struct Vec {
    static constexpr int width = 8;
    __m256 v;
};

// One double for each lane of a Vec, for sums that need more precision than float32.
struct Wide {
    __m256d low, high;
};

#define MGLU_X86(name) _mm256_##name
#include "vec_x86.h"
#undef MGLU_X86

MGLU_INLINE Vec abs(Vec a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v)}; }
MGLU_INLINE Vec if_less(Vec a, Vec b, Vec yes, Vec no) {
    return {_mm256_blendv_ps(no.v, yes.v, _mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ))};
}
// Sets the bit of each lane in which a >= b is false, as it is if a or b is NaN.
MGLU_INLINE std::uint32_t lanes_below(Vec a, Vec b) {
    return static_cast<std::uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a.v, b.v, _CMP_NGE_UQ)));
}
MGLU_INLINE Vec round_even(Vec a) { return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// Returns a * 2^n for a whole number n in [-126, 127].
MGLU_INLINE Vec scale_by_power(Vec a, Vec n) {
    const __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127)), 23);
    return {_mm256_mul_ps(a.v, _mm256_castsi256_ps(exponent))};
}
// Returns [a0 + a1, a2 + a3, .., b0 + b1, ..].
MGLU_INLINE Vec pair_sums(Vec a, Vec b) {
    const __m256 mixed = _mm256_hadd_ps(a.v, b.v);
    return {_mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(mixed), 0xd8))};
}

// Transposes eight vectors: first 2 x 2 numbers, then 2 x 2 pairs, then halves.
MGLU_INLINE void transpose(Vec (&rows)[8]) {
    __m256 pairs[8], quads[8];
    unrolled<4>([&](auto i) MGLU_STEP {
        pairs[2 * i] = _mm256_unpacklo_ps(rows[2 * i].v, rows[2 * i + 1].v);
        pairs[2 * i + 1] = _mm256_unpackhi_ps(rows[2 * i].v, rows[2 * i + 1].v);
    });
    unrolled<4>([&](auto i) MGLU_STEP {
        constexpr int from = i / 2 * 4 + i % 2, to = i / 2 * 4 + i % 2 * 2;
        quads[to] = _mm256_shuffle_ps(pairs[from], pairs[from + 2], 0x44);
        quads[to + 1] = _mm256_shuffle_ps(pairs[from], pairs[from + 2], 0xee);
    });
    unrolled<4>([&](auto i) MGLU_STEP {
        rows[i].v = _mm256_permute2f128_ps(quads[i], quads[i + 4], 0x20);
        rows[i + 4].v = _mm256_permute2f128_ps(quads[i], quads[i + 4], 0x31);
    });
}

// Loads eight consecutive numbers into every group of eight lanes; a Vec has one group.
MGLU_INLINE Vec load_octet(const float* p) { return {_mm256_loadu_ps(p)}; }
MGLU_INLINE Vec load_octet(const BFloat16* p) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16))};
}
MGLU_INLINE Vec load_octet(const Float16* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
MGLU_INLINE Vec load_octet(const Int8* p) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes))};
}
MGLU_INLINE Vec load_octet(const Fp8* p) {  // see to_float; the copy of the sign in bit 14 is cleared first
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)), bit_14 = _mm_set1_epi16(0x4000);
    const __m128i digits = _mm_andnot_si128(bit_14, _mm_slli_epi16(_mm_cvtepi8_epi16(bytes), 7));
    const __m128i carried = _mm_and_si128(_mm_add_epi16(digits, _mm_set1_epi16(0x80)), bit_14);
    return {_mm256_cvtph_ps(_mm_or_si128(digits, carried))};
}

MGLU_INLINE Wide widen(Vec a) {
    return {_mm256_cvtps_pd(_mm256_castps256_ps128(a.v)), _mm256_cvtps_pd(_mm256_extractf128_ps(a.v, 1))};
}
MGLU_INLINE Vec narrow(Wide a) { return {_mm256_set_m128(_mm256_cvtpd_ps(a.high), _mm256_cvtpd_ps(a.low))}; }
