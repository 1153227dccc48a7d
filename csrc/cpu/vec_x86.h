// The operations that AVX2 and AVX-512 have under the same names. Included by vec_avx2.h and vec_avx512.h, which define
// the registers of Vec and Wide and MGLU_X86(name), the name of an intrinsic.

MGLU_INLINE Vec load(const float* p) { return {MGLU_X86(loadu_ps)(p)}; }
MGLU_INLINE void store(float* p, Vec a) { MGLU_X86(storeu_ps)(p, a.v); }
MGLU_INLINE Vec broadcast(float x) { return {MGLU_X86(set1_ps)(x)}; }
MGLU_INLINE Vec operator+(Vec a, Vec b) { return {MGLU_X86(add_ps)(a.v, b.v)}; }
MGLU_INLINE Vec operator-(Vec a, Vec b) { return {MGLU_X86(sub_ps)(a.v, b.v)}; }
MGLU_INLINE Vec operator*(Vec a, Vec b) { return {MGLU_X86(mul_ps)(a.v, b.v)}; }
MGLU_INLINE Vec operator/(Vec a, Vec b) { return {MGLU_X86(div_ps)(a.v, b.v)}; }
MGLU_INLINE Vec fma(Vec a, Vec b, Vec c) { return {MGLU_X86(fmadd_ps)(a.v, b.v, c.v)}; }
// max and min return b if b is NaN, as max_ps and min_ps do.
MGLU_INLINE Vec max(Vec a, Vec b) { return {MGLU_X86(max_ps)(a.v, b.v)}; }
MGLU_INLINE Vec min(Vec a, Vec b) { return {MGLU_X86(min_ps)(a.v, b.v)}; }
MGLU_INLINE Vec copy_sign(Vec magnitude, Vec sign) {
    const auto bit = MGLU_X86(set1_ps)(-0.0f);
    return {MGLU_X86(or_ps)(MGLU_X86(andnot_ps)(bit, magnitude.v), MGLU_X86(and_ps)(bit, sign.v))};
}

MGLU_INLINE Wide load_wide(const double* p) { return {MGLU_X86(loadu_pd)(p), MGLU_X86(loadu_pd)(p + Vec::width / 2)}; }
MGLU_INLINE void store(double* p, Wide a) {
    MGLU_X86(storeu_pd)(p, a.low);
    MGLU_X86(storeu_pd)(p + Vec::width / 2, a.high);
}
MGLU_INLINE Wide broadcast_wide(double x) { return {MGLU_X86(set1_pd)(x), MGLU_X86(set1_pd)(x)}; }
MGLU_INLINE Wide operator+(Wide a, Wide b) {
    return {MGLU_X86(add_pd)(a.low, b.low), MGLU_X86(add_pd)(a.high, b.high)};
}
MGLU_INLINE Wide operator-(Wide a, Wide b) {
    return {MGLU_X86(sub_pd)(a.low, b.low), MGLU_X86(sub_pd)(a.high, b.high)};
}
MGLU_INLINE Wide fma(Wide a, Wide b, Wide c) {
    return {MGLU_X86(fmadd_pd)(a.low, b.low, c.low), MGLU_X86(fmadd_pd)(a.high, b.high, c.high)};
}
