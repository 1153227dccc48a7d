// Eight floats in the vector extension of GCC and Clang, which every target supports with SSE2, NEON or scalars.

#include "unrolled.h"
#include "element.h"

struct Vec {
    static constexpr int width = 8;
    using Floats8 = float __attribute__((vector_size(32)));
    using Ints8 = std::int32_t __attribute__((vector_size(32)));
    Floats8 v;
};

MGLU_INLINE Vec::Ints8 bits_of(Vec a) { return bit_cast<Vec::Ints8>(a.v); }
MGLU_INLINE Vec choose(Vec::Ints8 mask, Vec yes, Vec no) {
    return {bit_cast<Vec::Floats8>((bits_of(yes) & mask) | (bits_of(no) & ~mask))};
}

MGLU_INLINE Vec load(const float* p) {
    Vec a;
    __builtin_memcpy(&a.v, p, sizeof(a.v));
    return a;
}
MGLU_INLINE void store(float* p, Vec a) { __builtin_memcpy(p, &a.v, sizeof(a.v)); }
MGLU_INLINE Vec broadcast(float x) { return {Vec::Floats8{x, x, x, x, x, x, x, x}}; }
MGLU_INLINE Vec operator+(Vec a, Vec b) { return {a.v + b.v}; }
MGLU_INLINE Vec operator-(Vec a, Vec b) { return {a.v - b.v}; }
MGLU_INLINE Vec operator*(Vec a, Vec b) { return {a.v * b.v}; }
MGLU_INLINE Vec operator/(Vec a, Vec b) { return {a.v / b.v}; }
MGLU_INLINE Vec fma(Vec a, Vec b, Vec c) { return {a.v * b.v + c.v}; }
// max and min return b if b is NaN, as x86's instructions do.
MGLU_INLINE Vec max(Vec a, Vec b) { return choose(a.v > b.v, a, b); }
MGLU_INLINE Vec min(Vec a, Vec b) { return choose(a.v < b.v, a, b); }
MGLU_INLINE Vec abs(Vec a) { return {bit_cast<Vec::Floats8>(bits_of(a) & 0x7fffffff)}; }
MGLU_INLINE Vec copy_sign(Vec magnitude, Vec sign) {
    const Vec::Ints8 magnitude_bits = bits_of(magnitude) & 0x7fffffff;
    return {bit_cast<Vec::Floats8>(magnitude_bits | (bits_of(sign) & ~0x7fffffff))};
}
MGLU_INLINE Vec if_less(Vec a, Vec b, Vec yes, Vec no) { return choose(a.v < b.v, yes, no); }
// Sets the bit of each lane in which a >= b is false, as it is if a or b is NaN.
MGLU_INLINE std::uint32_t lanes_below(Vec a, Vec b) {
    std::uint32_t lanes = 0;
    for (int i = 0; i < 8; ++i) lanes |= static_cast<std::uint32_t>(!(a.v[i] >= b.v[i])) << i;
    return lanes;
}
// Rounds to whole numbers, if |a| < 2^22. The last bit of a + magic has the value 1, so the addition itself rounds.
MGLU_INLINE Vec round_even(Vec a) {
    const Vec magic = broadcast(0x1.8p23f);
    return (a + magic) - magic;
}
// Returns a * 2^n for a whole number n in [-126, 127].
MGLU_INLINE Vec scale_by_power(Vec a, Vec n) {
    const Vec::Ints8 exponent = (__builtin_convertvector(n.v, Vec::Ints8) + 127) << 23;
    return {a.v * bit_cast<Vec::Floats8>(exponent)};
}
// Returns [a0 + a1, a2 + a3, .., b0 + b1, ..].
MGLU_INLINE Vec pair_sums(Vec a, Vec b) {
    return {Vec::Floats8{a.v[0] + a.v[1], a.v[2] + a.v[3], a.v[4] + a.v[5], a.v[6] + a.v[7], b.v[0] + b.v[1],
                         b.v[2] + b.v[3], b.v[4] + b.v[5], b.v[6] + b.v[7]}};
}

MGLU_INLINE void transpose(Vec (&rows)[8]) {
    float numbers[8][8];
    for (int i = 0; i < 8; ++i) {
        for (int j = 0; j < 8; ++j) numbers[j][i] = rows[i].v[j];
    }
    for (int i = 0; i < 8; ++i) rows[i] = load(numbers[i]);
}

// Loads eight consecutive numbers into every group of eight lanes; a Vec has one group.
template <class E>
MGLU_INLINE Vec load_octet(const E* p) {
    Vec a;
    for (int i = 0; i < 8; ++i) a.v[i] = to_float(p[i]);
    return a;
}

// One double for each lane of a Vec, for sums that need more precision than float32.
struct Wide {
    using Doubles8 = double __attribute__((vector_size(64)));
    Doubles8 v;
};

MGLU_INLINE Wide load_wide(const double* p) {
    Wide a;
    __builtin_memcpy(&a.v, p, sizeof(a.v));
    return a;
}
MGLU_INLINE void store(double* p, Wide a) { __builtin_memcpy(p, &a.v, sizeof(a.v)); }
MGLU_INLINE Wide broadcast_wide(double x) { return {Wide::Doubles8{x, x, x, x, x, x, x, x}}; }
MGLU_INLINE Wide widen(Vec a) { return {__builtin_convertvector(a.v, Wide::Doubles8)}; }
MGLU_INLINE Vec narrow(Wide a) { return {__builtin_convertvector(a.v, Vec::Floats8)}; }
MGLU_INLINE Wide operator+(Wide a, Wide b) { return {a.v + b.v}; }
MGLU_INLINE Wide operator-(Wide a, Wide b) { return {a.v - b.v}; }
MGLU_INLINE Wide fma(Wide a, Wide b, Wide c) { return {a.v * b.v + c.v}; }
