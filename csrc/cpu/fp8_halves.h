// fp8 as float16, divided by kFactor (element.h). Included inside a file's own namespace, below the target pragma.
//
// Bit 14 of the shifted words is a second copy of the sign, and is cleared.
MGLU_INLINE __m128i load_halves(const Fp8* p) {
    const __m128i words = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    const __m128i digits = _mm_andnot_si128(_mm_set1_epi16(0x4000), _mm_slli_epi16(words, 7));
    const __m128i carried = _mm_and_si128(_mm_add_epi16(digits, _mm_set1_epi16(0x80)), _mm_set1_epi16(0x4000));
    return _mm_or_si128(digits, carried);
}
