// Tiles of bfloat16: 16 rows of 16 pairs. Included inside a file's own namespace, after vec_avx512.h and mask_words.h.
//
// Rows of a tile of W are features, as they are in memory, masked or not. A tile of x is transposed, in pairs of
// in_features: its rows are pairs, and its columns are tokens.

constexpr std::int64_t kTile = 256;  // floats, or pairs of bfloat16: 1 KB
constexpr std::int64_t kLine = 16;   // padding: tiles a power of two apart would compete for few sets of L1
constexpr std::int64_t kSpacedTile = kTile + kLine;
constexpr std::int64_t kGroupFeatures = 32;           // features of two tiles
constexpr std::int64_t kDeep = 32;                    // in_features of a tile
constexpr std::int64_t kStepOctets = kDeep / kOctet;  // mask bytes of a row of a tile, for each mask

// The permutations that transpose 16 x 16 numbers of 32 bits. In step `size`, squares of that size on both sides of the
// diagonal are swapped.
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

// Rounds the results of two features and 16 tokens to pairs of bfloat16.
MGLU_INLINE __m512i round_pairs(Vec even, Vec odd) {
    const __m512i halves = bit_cast<__m512i>(_mm512_cvtne2ps_pbh(odd.v, even.v));
    const __m512i order =
        _mm512_setr_epi32(0x100000, 0x110001, 0x120002, 0x130003, 0x140004, 0x150005, 0x160006, 0x170007, 0x180008,
                          0x190009, 0x1a000a, 0x1b000b, 0x1c000c, 0x1d000d, 0x1e000e, 0x1f000f);
    return _mm512_permutexvar_epi16(order, halves);
}
