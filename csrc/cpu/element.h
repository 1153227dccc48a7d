// The stored element types and their conversions, one element at a time; vec_*.h converts whole vectors. Included
// inside a file's own namespace.

struct BFloat16 {
    std::uint16_t bits;
};
struct Float16 {
    std::uint16_t bits;
};

// Stored weights of the formats int8_row and fp8_row (float8_e4m3fn).
struct Int8 {
    std::int8_t bits;
};
struct Fp8 {
    std::uint8_t bits;
};

template <class To, class From>
MGLU_INLINE To bit_cast(const From& from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    __builtin_memcpy(&to, &from, sizeof(To));
    return to;
}

MGLU_INLINE float to_float(float x) { return x; }

MGLU_INLINE float to_float(BFloat16 x) { return bit_cast<float>(static_cast<std::uint32_t>(x.bits) << 16); }

// Rebases the exponent by a multiplication, which also makes float16's subnormal numbers normal.
MGLU_INLINE float to_float(Float16 x) {
    const std::uint32_t sign = static_cast<std::uint32_t>(x.bits & 0x8000u) << 16;
    const std::uint32_t magnitude = static_cast<std::uint32_t>(x.bits & 0x7fffu) << 13;
    if (magnitude >= 0x0f800000u) return bit_cast<float>(sign | magnitude | 0x7f800000u);  // infinity, NaN
    return bit_cast<float>(sign | bit_cast<std::uint32_t>(bit_cast<float>(magnitude) * 0x1p112f));
}

MGLU_INLINE float to_float(Int8 x) { return x.bits; }

// An fp8 number is read as a float16 with the same exponent field. The exponent bias of float16 is larger by 8, so the
// result is the number divided by 256; multiplying the row's scale by kFactor corrects this. Except for the sign, the
// bits of an fp8 NaN are all 1, so adding 0x80 carries into bit 14 for NaN alone, which makes it a NaN of float16.
template <class W>
constexpr float kFactor = 1.0f;
template <>
constexpr float kFactor<Fp8> = 256.0f;

MGLU_INLINE float to_float(Fp8 x) {
    const int digits = (x.bits & 0x80) << 8 | (x.bits & 0x7f) << 7;
    return to_float(Float16{static_cast<std::uint16_t>(digits | ((digits + 0x80) & 0x4000))});
}

template <class E>
E from_float(float x);

template <>
MGLU_INLINE float from_float<float>(float x) {
    return x;
}

// Rounds to nearest, ties to even. A NaN stays a NaN.
template <>
MGLU_INLINE BFloat16 from_float<BFloat16>(float x) {
    const std::uint32_t bits = bit_cast<std::uint32_t>(x);
    if (x != x) return {static_cast<std::uint16_t>(0x7fc0u | (bits >> 16 & 0x8000u))};
    return {static_cast<std::uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}

// Rounds to nearest, ties to even.
template <>
MGLU_INLINE Float16 from_float<Float16>(float x) {
    const std::uint32_t bits = bit_cast<std::uint32_t>(x);
    const auto sign = static_cast<std::uint16_t>(bits >> 16 & 0x8000u);
    const std::uint32_t magnitude = bits & 0x7fffffffu;
    const auto signed_bits = [sign](std::uint32_t bits) { return Float16{static_cast<std::uint16_t>(sign | bits)}; };
    if (magnitude > 0x7f800000u) return signed_bits(0x7e00u);
    if (magnitude >= 0x477ff000u) return signed_bits(0x7c00u);  // 65520 and above become infinity
    if (magnitude < 0x38800000u) {
        // Results below 2^-14 are multiples of 2^-24, the last bit of 0.5f, so adding 0.5f rounds to them.
        return signed_bits(bit_cast<std::uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u);
    }
    return signed_bits((magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13);
}
