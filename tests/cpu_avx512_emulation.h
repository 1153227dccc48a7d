// The AVX-512 intrinsics that csrc/cpu uses, as plain loops written from Intel's descriptions of them, so that the very
// source of the AVX-512 path computes on a machine that lacks the instructions. What a compiler makes of the real ones,
// and their speed, it does not show.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

template <class T, int N>
struct Lanes_ {
    T lane[N];
};
using __m128i = Lanes_<std::uint16_t, 8>;
using __m256i = Lanes_<std::uint16_t, 16>;
using __m512i = Lanes_<std::int32_t, 16>;
using __m256 = Lanes_<float, 8>;
using __m512 = Lanes_<float, 16>;
using __m512d = Lanes_<double, 8>;
using __mmask16 = std::uint16_t;

enum { _CMP_LT_OQ = 17 };

template <class To, class From>
To loaded_(const From* p) {
    To to;
    std::memcpy(&to, p, sizeof(to));
    return to;
}
template <class V, class F>
V each_(F f) {
    V v;
    for (int i = 0; i < static_cast<int>(sizeof(v.lane) / sizeof(v.lane[0])); ++i) v.lane[i] = f(i);
    return v;
}
inline std::uint32_t bits_(float x) { return loaded_<std::uint32_t>(&x); }
inline float float_(std::uint32_t x) { return loaded_<float>(&x); }

// Loads, stores, and moves of whole parts.
inline __m128i _mm_loadu_si128(const __m128i* p) { return loaded_<__m128i>(p); }
inline __m256 _mm256_loadu_ps(const float* p) { return loaded_<__m256>(p); }
inline __m512 _mm512_loadu_ps(const float* p) { return loaded_<__m512>(p); }
inline __m512d _mm512_loadu_pd(const double* p) { return loaded_<__m512d>(p); }
inline void _mm256_storeu_ps(float* p, __m256 a) { std::memcpy(p, &a, sizeof(a)); }
inline void _mm512_storeu_ps(float* p, __m512 a) { std::memcpy(p, &a, sizeof(a)); }
inline void _mm512_storeu_pd(double* p, __m512d a) { std::memcpy(p, &a, sizeof(a)); }
inline __m512 _mm512_set1_ps(float x) {
    return each_<__m512>([=](int) { return x; });
}
inline __m512d _mm512_set1_pd(double x) {
    return each_<__m512d>([=](int) { return x; });
}
template <class... Ints>
__m512i _mm512_setr_epi32(Ints... lanes) {
    static_assert(sizeof...(lanes) == 16);
    return {{lanes...}};
}
inline __m256i _mm256_broadcastsi128_si256(__m128i a) {
    return each_<__m256i>([&](int i) { return a.lane[i % 8]; });
}
inline __m512 _mm512_broadcast_f32x8(__m256 a) {
    return each_<__m512>([&](int i) { return a.lane[i % 8]; });
}
inline __m256 _mm512_castps512_ps256(__m512 a) {
    return each_<__m256>([&](int i) { return a.lane[i]; });
}
inline __m256 _mm512_extractf32x8_ps(__m512 a, int half) {
    return each_<__m256>([&](int i) { return a.lane[8 * half + i]; });
}
inline __m512 _mm512_insertf32x8(__m512 a, __m256 b, int half) {
    return each_<__m512>([&](int i) { return i / 8 == half ? b.lane[i % 8] : a.lane[i]; });
}
inline __m512 _mm512_permutex2var_ps(__m512 a, __m512i index, __m512 b) {
    return each_<__m512>([&](int i) { return (index.lane[i] & 16 ? b : a).lane[index.lane[i] & 15]; });
}

// Conversions.
inline __m512i _mm512_cvtepu16_epi32(__m256i a) {
    return each_<__m512i>([&](int i) { return static_cast<std::int32_t>(a.lane[i]); });
}
inline __m512i _mm512_slli_epi32(__m512i a, unsigned count) {
    return each_<__m512i>([&](int i) {
        return static_cast<std::int32_t>(static_cast<std::uint32_t>(a.lane[i]) << count);
    });
}
inline __m512 _mm512_castsi512_ps(__m512i a) { return loaded_<__m512>(&a); }
inline __m512 _mm512_cvtph_ps(__m256i a) {
    return each_<__m512>([&](int i) {
        const int half = a.lane[i], exponent = half >> 10 & 31, fraction = half & 1023;
        const float sign = half & 0x8000 ? -1.0f : 1.0f;
        if (exponent == 31) return fraction ? NAN : sign * INFINITY;
        if (exponent == 0) return sign * std::ldexp(static_cast<float>(fraction), -24);
        return sign * std::ldexp(static_cast<float>(fraction + 1024), exponent - 25);
    });
}
inline __m512d _mm512_cvtps_pd(__m256 a) {
    return each_<__m512d>([&](int i) { return static_cast<double>(a.lane[i]); });
}
inline __m256 _mm512_cvtpd_ps(__m512d a) {
    return each_<__m256>([&](int i) { return static_cast<float>(a.lane[i]); });
}

// Arithmetic.
inline __m512 _mm512_add_ps(__m512 a, __m512 b) {
    return each_<__m512>([&](int i) { return a.lane[i] + b.lane[i]; });
}
inline __m512 _mm512_sub_ps(__m512 a, __m512 b) {
    return each_<__m512>([&](int i) { return a.lane[i] - b.lane[i]; });
}
inline __m512 _mm512_mul_ps(__m512 a, __m512 b) {
    return each_<__m512>([&](int i) { return a.lane[i] * b.lane[i]; });
}
inline __m512 _mm512_div_ps(__m512 a, __m512 b) {
    return each_<__m512>([&](int i) { return a.lane[i] / b.lane[i]; });
}
inline __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) {
    return each_<__m512>([&](int i) { return std::fma(a.lane[i], b.lane[i], c.lane[i]); });
}
inline __m512 _mm512_max_ps(__m512 a, __m512 b) {  // the second where either is NaN
    return each_<__m512>([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
}
inline __m512 _mm512_min_ps(__m512 a, __m512 b) {
    return each_<__m512>([&](int i) { return a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]; });
}
inline __m512 _mm512_abs_ps(__m512 a) {
    return each_<__m512>([&](int i) { return std::fabs(a.lane[i]); });
}
inline __m512 _mm512_and_ps(__m512 a, __m512 b) {
    return each_<__m512>([&](int i) { return float_(bits_(a.lane[i]) & bits_(b.lane[i])); });
}
inline __m512 _mm512_andnot_ps(__m512 a, __m512 b) {
    return each_<__m512>([&](int i) { return float_(~bits_(a.lane[i]) & bits_(b.lane[i])); });
}
inline __m512 _mm512_or_ps(__m512 a, __m512 b) {
    return each_<__m512>([&](int i) { return float_(bits_(a.lane[i]) | bits_(b.lane[i])); });
}
inline __m512 _mm512_roundscale_ps(__m512 a, int) {
    return each_<__m512>([&](int i) { return std::nearbyint(a.lane[i]); });
}
inline __m512 _mm512_scalef_ps(__m512 a, __m512 b) {
    return each_<__m512>([&](int i) {
        const bool number = !std::isnan(a.lane[i]) && !std::isnan(b.lane[i]);
        return number ? std::ldexp(a.lane[i], static_cast<int>(std::floor(b.lane[i]))) : NAN;
    });
}
inline __m512d _mm512_add_pd(__m512d a, __m512d b) {
    return each_<__m512d>([&](int i) { return a.lane[i] + b.lane[i]; });
}
inline __m512d _mm512_sub_pd(__m512d a, __m512d b) {
    return each_<__m512d>([&](int i) { return a.lane[i] - b.lane[i]; });
}
inline __m512d _mm512_fmadd_pd(__m512d a, __m512d b, __m512d c) {
    return each_<__m512d>([&](int i) { return std::fma(a.lane[i], b.lane[i], c.lane[i]); });
}

// Masks.
inline __mmask16 _mm512_cmp_ps_mask(__m512 a, __m512 b, int) {
    unsigned mask = 0;
    for (int i = 0; i < 16; ++i) mask |= (a.lane[i] < b.lane[i] ? 1u : 0u) << i;
    return static_cast<__mmask16>(mask);
}
inline __m512 _mm512_mask_blend_ps(__mmask16 mask, __m512 a, __m512 b) {
    return each_<__m512>([&](int i) { return (mask >> i & 1 ? b : a).lane[i]; });
}
inline __m512 _mm512_mask_add_ps(__m512 unset, __mmask16 mask, __m512 a, __m512 b) {
    return each_<__m512>([&](int i) { return mask >> i & 1 ? a.lane[i] + b.lane[i] : unset.lane[i]; });
}
inline __m512 _mm512_maskz_mov_ps(__mmask16 mask, __m512 a) {
    return each_<__m512>([&](int i) { return mask >> i & 1 ? a.lane[i] : 0.0f; });
}
