// Sixteen floats in a 512-bit register, and masks as k-registers. Included inside a file's own namespace, below the
// target pragma.
//
// n_masks is the innermost dimension of the packed format, so a 16-bit k-register loads two masks of the same eight
// weights without moving bits. A vector holds the products of those weights twice, and each half sums one mask.
// row_sums_avx512.h instead uses vectors of 16 weights and one mask.

#include "unrolled.h"
#include "element.h"

struct Vec {
    static constexpr int width = 16;
    __m512 v;
};

// One double for each lane of a Vec, for sums that need more precision than float32.
struct Wide {
    __m512d low, high;
};

#define MGLU_X86(name) _mm512_##name
#include "vec_x86.h"
#undef MGLU_X86

MGLU_INLINE Vec abs(Vec a) { return {_mm512_abs_ps(a.v)}; }
MGLU_INLINE Vec if_less(Vec a, Vec b, Vec yes, Vec no) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), no.v, yes.v)};
}
// Sets the bit of each lane in which a >= b is false, as it is if a or b is NaN.
MGLU_INLINE std::uint32_t lanes_below(Vec a, Vec b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_NGE_UQ); }
MGLU_INLINE Vec round_even(Vec a) { return {_mm512_roundscale_ps(a.v, 0)}; }
// Returns a * 2^n for a whole number n.
MGLU_INLINE Vec scale_by_power(Vec a, Vec n) { return {_mm512_scalef_ps(a.v, n.v)}; }
// Returns [a0 + a1, a2 + a3, .., b0 + b1, ..].
MGLU_INLINE Vec pair_sums(Vec a, Vec b) {
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    return {_mm512_add_ps(_mm512_permutex2var_ps(a.v, even, b.v), _mm512_permutex2var_ps(a.v, odd, b.v))};
}

// The permutations that transpose 16 x 16 numbers of 32 bits. Step s swaps the squares of size 2^s on both sides of the
// diagonal.
struct Swaps {
    alignas(64) std::int32_t low[4][16], high[4][16];
    constexpr Swaps() : low(), high() {
        for (int step = 0; step < 4; ++step) {
            for (int lane = 0; lane < 16; ++lane) {
                const int size = 1 << step, other = 16 + (lane ^ size);
                low[step][lane] = lane & size ? other : lane;
                high[step][lane] = lane & size ? 16 + lane : lane ^ size;
            }
        }
    }
};
static constexpr Swaps kSwaps;

MGLU_INLINE void transpose(__m512i (&rows)[16]) {
    unrolled<4>([&](auto step) MGLU_STEP {
        constexpr int size = 1 << step;
        const __m512i low = _mm512_loadu_si512(kSwaps.low[step]), high = _mm512_loadu_si512(kSwaps.high[step]);
        unrolled<8>([&](auto i) MGLU_STEP {
            constexpr int first = i / size * 2 * size + i % size;
            const __m512i a = rows[first], b = rows[first + size];
            rows[first] = _mm512_permutex2var_epi32(a, low, b);
            rows[first + size] = _mm512_permutex2var_epi32(a, high, b);
        });
    });
}

MGLU_INLINE void transpose(Vec (&rows)[16]) {
    __m512i words[16];
    unrolled<16>([&](auto i) MGLU_STEP { words[i] = _mm512_castps_si512(rows[i].v); });
    transpose(words);
    unrolled<16>([&](auto i) MGLU_STEP { rows[i].v = _mm512_castsi512_ps(words[i]); });
}

// Loads eight consecutive numbers into every group of eight lanes; a Vec has two groups.
MGLU_INLINE Vec load_octet(const float* p) { return {_mm512_broadcast_f32x8(_mm256_loadu_ps(p))}; }
MGLU_INLINE Vec load_octet(const BFloat16* p) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_broadcastsi128_si256(bits));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
MGLU_INLINE Vec load_octet(const Float16* p) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm512_cvtph_ps(_mm256_broadcastsi128_si256(bits))};
}

// Converts sixteen 8-bit weights; the unused pointer tells their type.
MGLU_INLINE Vec floats_of(const Int8*, __m128i bytes) { return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))}; }
MGLU_INLINE Vec floats_of(const Fp8*, __m128i bytes) {  // see to_float; the copy of the sign in bit 14 is cleared first
    const __m256i bit_14 = _mm256_set1_epi16(0x4000);
    const __m256i digits = _mm256_andnot_si256(bit_14, _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7));
    const __m256i sum = _mm256_add_epi16(digits, _mm256_set1_epi16(0x80));
    return {_mm512_cvtph_ps(_mm256_ternarylogic_epi32(digits, sum, bit_14, 0xf8))};  // digits | (sum & bit_14)
}
template <class W>
MGLU_INLINE Vec load_octet(const W* p) {
    std::int64_t bytes;
    __builtin_memcpy(&bytes, p, sizeof(bytes));
    return floats_of(p, _mm_set1_epi64x(bytes));
}

// Adds the two halves of each vector. The lower half of the result has the sums of a, the upper half the sums of b.
MGLU_INLINE Vec half_sums(Vec a, Vec b) {
    const Vec low{_mm512_insertf32x8(a.v, _mm512_castps512_ps256(b.v), 1)};
    const Vec high{_mm512_insertf32x8(b.v, _mm512_extractf32x8_ps(a.v, 1), 0)};
    return low + high;
}

// Loads sixteen consecutive numbers.
MGLU_INLINE Vec load_16(const float* p) { return load(p); }
MGLU_INLINE Vec load_16(const BFloat16* p) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
}
MGLU_INLINE Vec load_16(const Float16* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
template <class W>
MGLU_INLINE Vec load_16(const W* p) {
    return floats_of(p, _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

MGLU_INLINE Wide widen(Vec a) {
    return {_mm512_cvtps_pd(_mm512_castps512_ps256(a.v)), _mm512_cvtps_pd(_mm512_extractf32x8_ps(a.v, 1))};
}
MGLU_INLINE Vec narrow(Wide a) {
    const __m512 low = _mm512_broadcast_f32x8(_mm512_cvtpd_ps(a.low));
    return {_mm512_insertf32x8(low, _mm512_cvtpd_ps(a.high), 1)};
}

// --- Masks --------------------------------------------------------------------------------------------------------

constexpr int kMasksPerVec = 2;

using Mask = __mmask16;

// Loads `Count` masks of eight weights, one byte each, from `bits`. With an odd number of masks, the last vector loads
// only one mask, and its upper eight lanes sum nothing. Each byte of `flip` is 0, or 255 to complement its mask.
template <int Count>
MGLU_INLINE Mask load_mask(const std::uint8_t* bits, std::uint32_t flip) {
    if (Count == 1) return static_cast<Mask>(*bits ^ flip);
    std::uint16_t both;
    __builtin_memcpy(&both, bits, sizeof(both));
    return static_cast<Mask>(both ^ flip);
}

// Adds the products that the mask keeps to `sum`.
MGLU_INLINE Vec add_under(Mask mask, Vec sum, Vec product) {
    return {_mm512_mask_add_ps(sum.v, mask, sum.v, product.v)};
}
// Multiplies by the mask instead of selecting, since infinity times 0 is NaN in the naive layer.
MGLU_INLINE Vec apply_mask(Vec a, Mask mask) {
    return {_mm512_mul_ps(a.v, _mm512_maskz_mov_ps(mask, _mm512_set1_ps(1.0f)))};
}
// Returns a vector with numbers[0] in the even and numbers[1] in the odd lanes. sums_over_lanes() returns the sums of
// two masks in this order.
MGLU_INLINE Vec broadcast_each(const float* numbers) {
    return {_mm512_mask_blend_ps(0xaaaa, _mm512_set1_ps(numbers[0]), _mm512_set1_ps(numbers[1]))};
}
// Stores the first `count` groups of eight lanes at p, p + stride, ...
MGLU_INLINE void store_octets(float* p, std::int64_t stride, int count, Vec a) {
    _mm256_storeu_ps(p, _mm512_castps512_ps256(a.v));
    if (count == 2) _mm256_storeu_ps(p + stride, _mm512_extractf32x8_ps(a.v, 1));
}
// Sums a vector over its masks; the results are in the first eight lanes.
MGLU_INLINE Vec sum_over_masks(Vec a) { return pair_sums(a, a); }
