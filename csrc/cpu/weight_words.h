// 64 weights as bfloat16, in two registers. Included inside a file's own namespace, after vec_avx512.h.
//
// `vdpbf16ps` counts subnormal numbers as 0, so fp8 cannot become bfloat16 by shifting its bits. Instead, 8-bit weights
// are looked up in two tables, one of the low and one of the high bytes of the bfloat16 numbers, with an entry for each
// of the 128 magnitudes. A table fills two registers, in which VBMI looks up 64 bytes at once.

struct WeightWords {
    __m512i low, high;  // columns 0 to 31, and 32 to 63
};

MGLU_INLINE WeightWords load_words(const BFloat16* p) { return {_mm512_loadu_si512(p), _mm512_loadu_si512(p + 32)}; }

// The low and the high bytes of bfloat16 numbers. The index is the magnitude of an 8-bit weight, its low seven bits.
struct ByteTables {
    alignas(64) std::uint8_t low[128], high[128];
};

// The bits of number * 2^exponent in bfloat16, for 0 <= number < 256.
constexpr std::uint16_t bfloat16_bits(int number, int exponent) {
    if (number == 0) return 0;
    int shift = 0;
    while (number << shift < 128) ++shift;
    return static_cast<std::uint16_t>((127 + 7 + exponent - shift) << 7 | (number << shift & 127));
}

template <class W>
constexpr ByteTables byte_tables() {
    ByteTables tables{};
    for (int magnitude = 0; magnitude < 128; ++magnitude) {
        int bits = bfloat16_bits(magnitude, 0);
        if (std::is_same_v<W, Fp8>) {  // three fraction bits, exponent bias 7; divided by kFactor, as in to_float
            const int exponent = magnitude >> 3, fraction = magnitude & 7;
            bits = bfloat16_bits(fraction + (exponent ? 8 : 0), (exponent ? exponent : 1) - 10 - 8);
            if (magnitude == 127) bits = 0x7fc0;  // NaN
        }
        tables.low[magnitude] = static_cast<std::uint8_t>(bits);
        tables.high[magnitude] = static_cast<std::uint8_t>(bits >> 8);
    }
    return tables;
}
template <class W>
static constexpr ByteTables kByteTables = byte_tables<W>();

MGLU_INLINE __m512i look_up(const std::uint8_t* table, __m512i index) {
    return _mm512_permutex2var_epi8(_mm512_loadu_si512(table), index, _mm512_loadu_si512(table + 64));
}

template <class W>
MGLU_INLINE WeightWords load_words(const W* p) {  // Int8 or Fp8
    // unpacklo takes the first eight bytes of each 128-bit lane, so columns 0 to 31 have to be in those bytes.
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    const __m512i bytes = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(p));
    const __m512i magnitude = std::is_same_v<W, Int8> ? _mm512_abs_epi8(bytes) : bytes;  // bit 7 is ignored
    const __m512i low = look_up(kByteTables<W>.low, magnitude), unsigned_high = look_up(kByteTables<W>.high, magnitude);
    __m512i high = _mm512_or_si512(unsigned_high, _mm512_and_si512(bytes, _mm512_set1_epi8(-128)));
    if (std::is_same_v<W, Int8>) {  // 128, the magnitude of -128, is not in the table
        high = _mm512_mask_mov_epi8(high, _mm512_movepi8_mask(magnitude), _mm512_set1_epi8(-61));
    }
    return {_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)};
}
