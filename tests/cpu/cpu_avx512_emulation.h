// Emulates the AVX-512 and AMX intrinsics that csrc/cpu uses, as plain loops written from Intel's descriptions, so that
// the kernels' source runs unchanged on machines without the instructions. Tests with this header check neither the
// code that a compiler generates from the real intrinsics nor its speed.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
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
using __m512bh = Lanes_<std::uint16_t, 32>;
using __mmask16 = std::uint16_t;
using __mmask32 = std::uint32_t;
using __mmask64 = std::uint64_t;

enum { _CMP_LT_OQ = 17, _CMP_NGE_UQ = 25 };

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
// Defines an intrinsic by an expression for lane i of its result.
#define MGLU_LANES(V, name, parameters, lane_i)         \
    inline V name parameters {                          \
        return each_<V>([&](int i) { return lane_i; }); \
    }
inline std::uint32_t bits_(float x) { return loaded_<std::uint32_t>(&x); }
inline float float_(std::uint32_t x) { return loaded_<float>(&x); }

// Loads, stores, and moves of parts of registers.
inline __m128i _mm_loadu_si128(const __m128i* p) { return loaded_<__m128i>(p); }
inline __m256i _mm256_loadu_si256(const __m256i* p) { return loaded_<__m256i>(p); }
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
inline __m128i _mm_set1_epi64x(std::int64_t x) {
    const std::int64_t both[2] = {x, x};
    return loaded_<__m128i>(both);
}
inline __m256i _mm256_set1_epi16(int x) {
    return each_<__m256i>([=](int) { return static_cast<std::uint16_t>(x); });
}
template <class... Ints>
__m512i _mm512_setr_epi64(Ints... lanes) {
    const std::int64_t all[] = {lanes...};
    static_assert(sizeof(all) == 64);
    return loaded_<__m512i>(all);
}
MGLU_LANES(__m256i, _mm256_broadcastsi128_si256, (__m128i a), a.lane[i % 8])
MGLU_LANES(__m512, _mm512_broadcast_f32x8, (__m256 a), a.lane[i % 8])
MGLU_LANES(__m256, _mm512_castps512_ps256, (__m512 a), a.lane[i])
MGLU_LANES(__m256, _mm512_extractf32x8_ps, (__m512 a, int half), a.lane[8 * half + i])
MGLU_LANES(__m512, _mm512_insertf32x8, (__m512 a, __m256 b, int half), i / 8 == half ? b.lane[i % 8] : a.lane[i])
inline __m512 _mm512_permutex2var_ps(__m512 a, __m512i index, __m512 b) {
    return each_<__m512>([&](int i) { return (index.lane[i] & 16 ? b : a).lane[index.lane[i] & 15]; });
}

inline __m256i _mm512_castsi512_si256(__m512i a) { return loaded_<__m256i>(&a); }
inline __m256i _mm512_extracti64x4_epi64(__m512i a, int half) { return loaded_<__m256i>(a.lane + 8 * half); }

// Conversions.
inline int signed_byte_(const __m128i& a, int i) { return static_cast<std::int8_t>(a.lane[i / 2] >> i % 2 * 8 & 255); }
MGLU_LANES(__m512i, _mm512_cvtepi8_epi32, (__m128i a), signed_byte_(a, i))
MGLU_LANES(__m256i, _mm256_cvtepi8_epi16, (__m128i a), static_cast<std::uint16_t>(signed_byte_(a, i)))
MGLU_LANES(__m512, _mm512_cvtepi32_ps, (__m512i a), static_cast<float>(a.lane[i]))
MGLU_LANES(__m512i, _mm512_cvtepu16_epi32, (__m256i a), static_cast<std::int32_t>(a.lane[i]))
inline __m512i _mm512_slli_epi32(__m512i a, unsigned count) {
    return each_<__m512i>(
        [&](int i) { return static_cast<std::int32_t>(static_cast<std::uint32_t>(a.lane[i]) << count); });
}
inline __m512 _mm512_castsi512_ps(__m512i a) { return loaded_<__m512>(&a); }
inline __m512i _mm512_castps_si512(__m512 a) { return loaded_<__m512i>(&a); }
inline __m512 _mm512_cvtph_ps(__m256i a) {
    return each_<__m512>([&](int i) {
        const int half = a.lane[i], exponent = half >> 10 & 31, fraction = half & 1023;
        const float sign = half & 0x8000 ? -1.0f : 1.0f;
        if (exponent == 31) return fraction ? NAN : sign * INFINITY;
        if (exponent == 0) return sign * std::ldexp(static_cast<float>(fraction), -24);
        return sign * std::ldexp(static_cast<float>(fraction + 1024), exponent - 25);
    });
}
MGLU_LANES(__m512d, _mm512_cvtps_pd, (__m256 a), static_cast<double>(a.lane[i]))
MGLU_LANES(__m256, _mm512_cvtpd_ps, (__m512d a), static_cast<float>(a.lane[i]))

// Arithmetic.
MGLU_LANES(__m512, _mm512_add_ps, (__m512 a, __m512 b), a.lane[i] + b.lane[i])
MGLU_LANES(__m512, _mm512_sub_ps, (__m512 a, __m512 b), a.lane[i] - b.lane[i])
MGLU_LANES(__m512, _mm512_mul_ps, (__m512 a, __m512 b), a.lane[i] * b.lane[i])
MGLU_LANES(__m512, _mm512_div_ps, (__m512 a, __m512 b), a.lane[i] / b.lane[i])
MGLU_LANES(__m512, _mm512_fmadd_ps, (__m512 a, __m512 b, __m512 c), std::fma(a.lane[i], b.lane[i], c.lane[i]))
inline __m512 _mm512_mask3_fmadd_ps(__m512 a, __m512 b, __m512 c, __mmask16 mask) {
    return each_<__m512>([&](int i) { return mask >> i & 1 ? std::fma(a.lane[i], b.lane[i], c.lane[i]) : c.lane[i]; });
}
// max_ps and min_ps return the second argument if either argument is NaN.
MGLU_LANES(__m512, _mm512_max_ps, (__m512 a, __m512 b), a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i])
MGLU_LANES(__m512, _mm512_min_ps, (__m512 a, __m512 b), a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i])
MGLU_LANES(__m512, _mm512_abs_ps, (__m512 a), std::fabs(a.lane[i]))
MGLU_LANES(__m512, _mm512_and_ps, (__m512 a, __m512 b), float_(bits_(a.lane[i]) & bits_(b.lane[i])))
MGLU_LANES(__m512, _mm512_andnot_ps, (__m512 a, __m512 b), float_(~bits_(a.lane[i]) & bits_(b.lane[i])))
MGLU_LANES(__m512, _mm512_or_ps, (__m512 a, __m512 b), float_(bits_(a.lane[i]) | bits_(b.lane[i])))
MGLU_LANES(__m512, _mm512_roundscale_ps, (__m512 a, int), std::nearbyint(a.lane[i]))
inline __m512 _mm512_scalef_ps(__m512 a, __m512 b) {
    return each_<__m512>([&](int i) {
        const bool number = !std::isnan(a.lane[i]) && !std::isnan(b.lane[i]);
        return number ? std::ldexp(a.lane[i], static_cast<int>(std::floor(b.lane[i]))) : NAN;
    });
}
MGLU_LANES(__m512d, _mm512_add_pd, (__m512d a, __m512d b), a.lane[i] + b.lane[i])
MGLU_LANES(__m512d, _mm512_sub_pd, (__m512d a, __m512d b), a.lane[i] - b.lane[i])
MGLU_LANES(__m512d, _mm512_fmadd_pd, (__m512d a, __m512d b, __m512d c), std::fma(a.lane[i], b.lane[i], c.lane[i]))

// Masks.
inline __mmask16 _mm512_cmp_ps_mask(__m512 a, __m512 b, int predicate) {
    unsigned mask = 0;
    for (int i = 0; i < 16; ++i) {
        const bool is_set = predicate == _CMP_LT_OQ ? a.lane[i] < b.lane[i] : !(a.lane[i] >= b.lane[i]);
        mask |= (is_set ? 1u : 0u) << i;
    }
    return static_cast<__mmask16>(mask);
}
MGLU_LANES(__m512, _mm512_mask_blend_ps, (__mmask16 mask, __m512 a, __m512 b), (mask >> i & 1 ? b : a).lane[i])
inline __m512 _mm512_mask_add_ps(__m512 unset, __mmask16 mask, __m512 a, __m512 b) {
    return each_<__m512>([&](int i) { return mask >> i & 1 ? a.lane[i] + b.lane[i] : unset.lane[i]; });
}
inline __m512 _mm512_maskz_loadu_ps(__mmask16 mask, const float* p) {
    return each_<__m512>([=](int i) { return mask >> i & 1 ? p[i] : 0.0f; });
}
inline void _mm512_mask_storeu_ps(float* p, __mmask16 mask, __m512 a) {
    for (int i = 0; i < 16; ++i) {
        if (mask >> i & 1) p[i] = a.lane[i];
    }
}
MGLU_LANES(__m512, _mm512_maskz_mov_ps, (__mmask16 mask, __m512 a), mask >> i & 1 ? a.lane[i] : 0.0f)

// Integers of 8, 16 and 32 bits.
template <class T>
T lane_(const __m512i& a, int i) {
    T lanes[64 / sizeof(T)];
    std::memcpy(lanes, &a, sizeof(a));
    return lanes[i];
}
template <class T, class F>
__m512i integers_(F f) {
    T lanes[64 / sizeof(T)];
    for (int i = 0; i < static_cast<int>(64 / sizeof(T)); ++i) lanes[i] = f(i);
    return loaded_<__m512i>(lanes);
}
inline __m512i _mm512_loadu_si512(const void* p) { return loaded_<__m512i>(p); }
inline void _mm512_storeu_si512(void* p, __m512i a) { std::memcpy(p, &a, sizeof(a)); }
inline __m512i _mm512_set1_epi16(std::int16_t x) {
    return integers_<std::int16_t>([=](int) { return x; });
}
MGLU_LANES(__m512i, _mm512_xor_si512, (__m512i a, __m512i b), a.lane[i] ^ b.lane[i])
inline __m512i _mm512_maskz_loadu_epi8(__mmask64 mask, const void* p) {
    const auto* bytes = static_cast<const std::uint8_t*>(p);
    return integers_<std::uint8_t>([=](int i) { return mask >> i & 1 ? bytes[i] : std::uint8_t{}; });
}
inline __m512i _mm512_maskz_loadu_epi16(__mmask32 mask, const void* p) {
    const auto* bytes = static_cast<const std::uint8_t*>(p);
    return integers_<std::uint16_t>(
        [=](int i) { return mask >> i & 1 ? loaded_<std::uint16_t>(bytes + 2 * i) : std::uint16_t{}; });
}
inline void _mm512_mask_storeu_epi16(void* p, __mmask32 mask, __m512i a) {
    for (int i = 0; i < 32; ++i) {
        const auto lane = lane_<std::uint16_t>(a, i);
        if (mask >> i & 1) std::memcpy(static_cast<std::uint8_t*>(p) + 2 * i, &lane, sizeof(lane));
    }
}
inline __m512i _mm512_maskz_mov_epi16(__mmask32 mask, __m512i a) {
    return integers_<std::uint16_t>(
        [&](int i) { return mask >> i & 1 ? lane_<std::uint16_t>(a, i) : std::uint16_t{}; });
}
inline __m512i _mm512_set1_epi8(std::int8_t x) {
    return integers_<std::int8_t>([=](int) { return x; });
}
MGLU_LANES(__m512i, _mm512_or_si512, (__m512i a, __m512i b), a.lane[i] | b.lane[i])
MGLU_LANES(__m512i, _mm512_and_si512, (__m512i a, __m512i b), a.lane[i] & b.lane[i])
MGLU_LANES(__m256i, _mm256_andnot_si256, (__m256i a, __m256i b), static_cast<std::uint16_t>(~a.lane[i] & b.lane[i]))
MGLU_LANES(__m256i, _mm256_slli_epi16, (__m256i a, int count), static_cast<std::uint16_t>(a.lane[i] << count))
MGLU_LANES(__m256i, _mm256_add_epi16, (__m256i a, __m256i b), static_cast<std::uint16_t>(a.lane[i] + b.lane[i]))
inline __m256i _mm256_ternarylogic_epi32(__m256i a, __m256i b, __m256i c, int of_bits) {
    return each_<__m256i>([&](int i) {
        unsigned result = 0;
        for (int bit = 0; bit < 16; ++bit) {
            const int index = (a.lane[i] >> bit & 1) << 2 | (b.lane[i] >> bit & 1) << 1 | (c.lane[i] >> bit & 1);
            result |= static_cast<unsigned>(of_bits >> index & 1) << bit;
        }
        return static_cast<std::uint16_t>(result);
    });
}
inline __m512i _mm512_abs_epi8(__m512i a) {
    return integers_<std::int8_t>([&](int i) { return static_cast<std::int8_t>(std::abs(lane_<std::int8_t>(a, i))); });
}
inline __mmask64 _mm512_movepi8_mask(__m512i a) {
    __mmask64 mask = 0;
    for (int i = 0; i < 64; ++i) mask |= static_cast<__mmask64>(lane_<std::uint8_t>(a, i) >> 7) << i;
    return mask;
}
inline __m512i _mm512_mask_mov_epi8(__m512i unset, __mmask64 mask, __m512i a) {
    return integers_<std::uint8_t>([&](int i) { return lane_<std::uint8_t>(mask >> i & 1 ? a : unset, i); });
}
inline __m512i unpacked_(const __m512i& a, const __m512i& b, int half) {
    return integers_<std::uint8_t>(
        [&](int i) { return lane_<std::uint8_t>(i % 2 ? b : a, i / 16 * 16 + 8 * half + i % 16 / 2); });
}
inline __m512i _mm512_unpacklo_epi8(__m512i a, __m512i b) { return unpacked_(a, b, 0); }
inline __m512i _mm512_unpackhi_epi8(__m512i a, __m512i b) { return unpacked_(a, b, 1); }
inline __m512i _mm512_permutex2var_epi8(__m512i a, __m512i index, __m512i b) {
    return integers_<std::uint8_t>([&](int i) {
        const int from = lane_<std::uint8_t>(index, i);
        return lane_<std::uint8_t>(from & 64 ? b : a, from & 63);
    });
}
inline __m512i _mm512_permutexvar_epi64(__m512i index, __m512i a) {
    return integers_<std::int64_t>([&](int i) { return lane_<std::int64_t>(a, lane_<std::int64_t>(index, i) & 7); });
}
inline __m512i _mm512_permutexvar_epi8(__m512i index, __m512i a) {
    return integers_<std::uint8_t>([&](int i) { return lane_<std::uint8_t>(a, lane_<std::uint8_t>(index, i) & 63); });
}
inline __m512i _mm512_permutexvar_epi16(__m512i index, __m512i a) {
    return integers_<std::uint16_t>(
        [&](int i) { return lane_<std::uint16_t>(a, lane_<std::uint16_t>(index, i) & 31); });
}
inline __m512i _mm512_permutex2var_epi32(__m512i a, __m512i index, __m512i b) {
    return each_<__m512i>([&](int i) { return (index.lane[i] & 16 ? b : a).lane[index.lane[i] & 15]; });
}

// bfloat16: subnormal operands and results count as 0, as on the hardware.
inline float flushed_(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }
inline float brain_(std::uint16_t x) { return flushed_(float_(static_cast<std::uint32_t>(x) << 16)); }
inline __m512bh _mm512_cvtne2ps_pbh(__m512 high, __m512 low) {
    return each_<__m512bh>([&](int i) {
        const float x = flushed_(i < 16 ? low.lane[i] : high.lane[i - 16]);
        const std::uint32_t bits = bits_(x);
        return static_cast<std::uint16_t>(std::isnan(x) ? bits >> 16 | 64 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    });
}
inline __m512 _mm512_dpbf16_ps(__m512 sum, __m512bh a, __m512bh b) {
    return each_<__m512>([&](int i) {
        const float odd = std::fma(brain_(a.lane[2 * i + 1]), brain_(b.lane[2 * i + 1]), flushed_(sum.lane[i]));
        return flushed_(std::fma(brain_(a.lane[2 * i]), brain_(b.lane[2 * i]), flushed_(odd)));
    });
}

// Tiles. Each thread must configure its tiles before use and release them before it ends: otherwise every later context
// switch would save 8 KB of tiles.
struct Tiles_ {
    bool configured = false;
    std::uint8_t rows[8] = {}, bytes[8] = {};
    float lane[8][16][16] = {};
    ~Tiles_() {
        if (configured) std::abort();
    }
    auto& of(int tile) {
        if (!configured || rows[tile] != 16 || bytes[tile] != 64) std::abort();  // the only shape that csrc/cpu uses
        return lane[tile];
    }
};
inline thread_local Tiles_ tiles_;
inline void _tile_loadconfig(const void* config) {
    const auto* bytes = static_cast<const std::uint8_t*>(config);
    tiles_.configured = bytes[0] == 1;
    for (int tile = 0; tile < 8; ++tile)
        tiles_.bytes[tile] = bytes[16 + 2 * tile], tiles_.rows[tile] = bytes[48 + tile];
}
inline void _tile_release() { tiles_.configured = false; }
inline void _tile_zero(int tile) { std::memset(tiles_.of(tile), 0, 1024); }
inline void _tile_loadd(int tile, const void* p, std::int64_t stride) {
    for (int row = 0; row < 16; ++row) {
        std::memcpy(tiles_.of(tile)[row], static_cast<const std::uint8_t*>(p) + row * stride, 64);
    }
}
inline void _tile_stored(int tile, void* p, std::int64_t stride) {
    for (int row = 0; row < 16; ++row) {
        std::memcpy(static_cast<std::uint8_t*>(p) + row * stride, tiles_.of(tile)[row], 64);
    }
}
inline void _tile_dpbf16ps(int sums, int left, int right) {
    const auto &a = tiles_.of(left), &b = tiles_.of(right);
    auto& c = tiles_.of(sums);
    const auto half = [](float pair, int odd) { return brain_(static_cast<std::uint16_t>(bits_(pair) >> 16 * odd)); };
    for (int m = 0; m < 16; ++m) {
        for (int n = 0; n < 16; ++n) {
            float sum[2] = {};
            for (int k = 0; k < 16; ++k) {
                for (int odd = 0; odd < 2; ++odd) {
                    sum[odd] = flushed_(std::fma(half(a[m][k], odd), half(b[k][n], odd), sum[odd]));
                }
            }
            c[m][n] = flushed_(flushed_(c[m][n]) + flushed_(sum[0] + sum[1]));
        }
    }
}
