// The stored element types, converted one at a time; vec_*.h converts whole vectors. Included inside a file's own
// namespace.

struct BFloat16 {
    std::uint16_t bits;
};
struct Float16 {
    std::uint16_t bits;
};

// The weights of int8_row, and of fp8_row (float8_e4m3fn).
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

// Rebases the exponent by a product, which also turns float16's subnormal numbers into normal ones.
MGLU_INLINE float to_float(Float16 x) {
    const std::uint32_t sign = static_cast<std::uint32_t>(x.bits & 0x8000u) << 16;
    const std::uint32_t magnitude = static_cast<std::uint32_t>(x.bits & 0x7fffu) << 13;
    if (magnitude >= 0x0f800000u) return bit_cast<float>(sign | magnitude | 0x7f800000u);  // infinity, NaN
    return bit_cast<float>(sign | bit_cast<std::uint32_t>(bit_cast<float>(magnitude) * 0x1p112f));
}

MGLU_INLINE float to_float(Int8 x) { return x.bits; }

// An fp8 number is read as the float16 with the same digits. Float16's exponents are larger by 8, so what is read is
// the number divided by 256, and the scale of the row is multiplied by kFactor. Only NaN, whose digits are all 1,
// carries into bit 14, which makes it float16's NaN.
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

// Rounds to nearest, ties to even, by adding a number whose last bit has the value of the result's last bit.
template <>
MGLU_INLINE Float16 from_float<Float16>(float x) {
    const std::uint32_t bits = bit_cast<std::uint32_t>(x);
    const auto sign = static_cast<std::uint16_t>(bits >> 16 & 0x8000u);
    const std::uint32_t magnitude = bits & 0x7fffffffu;
    const auto of = [sign](std::uint32_t value) { return Float16{static_cast<std::uint16_t>(sign | value)}; };
    if (magnitude > 0x7f800000u) return of(0x7e00u);
    if (magnitude >= 0x477ff000u) return of(0x7c00u);  // 65520 and above become infinity
    if (magnitude < 0x38800000u) {                     // below 2^-14 results are multiples of 2^-24, 0.5f's last bit
        return of(bit_cast<std::uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u);
    }
    return of((magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13);
}
