// Tiles of bfloat16: 16 rows of 16 pairs. Included inside a file's own namespace, after vec_avx512.h and mask_words.h.
//
// The rows of a tile of W are features; their weights, masked or unmasked, are in memory order. A tile of x is
// transposed: its rows are pairs of in_features, and its columns are tokens.

constexpr std::int64_t kTile = 256;  // size in floats, or in pairs of bfloat16: 1 KB
constexpr std::int64_t kLine = 16;   // padding, since tiles a power of two apart would compete for few sets of L1
constexpr std::int64_t kSpacedTile = kTile + kLine;
constexpr std::int64_t kGroupFeatures = 32;           // features of two tiles
constexpr std::int64_t kDeep = 32;                    // in_features of a tile
constexpr std::int64_t kStepOctets = kDeep / kOctet;  // bytes of one mask for a row of a tile

// Rounds the results of two features and 16 tokens to bfloat16, and interleaves them as pairs (even, odd).
MGLU_INLINE __m512i round_pairs(Vec even, Vec odd) {
    const __m512i halves = bit_cast<__m512i>(_mm512_cvtne2ps_pbh(odd.v, even.v));
    const __m512i order =
        _mm512_setr_epi32(0x100000, 0x110001, 0x120002, 0x130003, 0x140004, 0x150005, 0x160006, 0x170007, 0x180008,
                          0x190009, 0x1a000a, 0x1b000b, 0x1c000c, 0x1d000d, 0x1e000e, 0x1f000f);
    return _mm512_permutexvar_epi16(order, halves);
}
