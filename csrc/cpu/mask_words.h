// The masks of 32 weights as 32-bit k-registers, for 16-bit weights. Included inside a file's own namespace, below the
// target pragma.

// For every n_masks, the permutation that gathers the four bytes of each mask, which lie n_masks apart in the packed
// format.
struct ByteOrders {
    alignas(64) std::uint8_t of[kMaxMasks + 1][64];
    constexpr ByteOrders() : of() {
        for (int n = 1; n <= kMaxMasks; ++n) {
            for (int i = 0; i < 4 * n; ++i) of[n][i] = static_cast<std::uint8_t>(i % 4 * n + i / 4);
        }
    }
};
static constexpr ByteOrders kByteOrders;

// Masks of 64 or 32 lanes with the first `count` set, at most all of them.
MGLU_INLINE __mmask64 first_bytes(std::int64_t count) { return count < 64 ? (1ull << count) - 1 : ~0ull; }
MGLU_INLINE __mmask32 first_words(std::int64_t count) { return count < 32 ? (1u << count) - 1 : ~0u; }

MGLU_INLINE __m512i byte_order(std::int64_t n_masks) { return _mm512_loadu_si512(kByteOrders.of[n_masks]); }

struct MaskWords {
    alignas(64) std::uint32_t words[kMaxMasks];

    // Loads the `valid` bytes at `bits`. The others are not read and count as 0.
    MGLU_INLINE MaskWords(const std::uint8_t* bits, __mmask64 valid, __m512i order) {
        _mm512_storeu_si512(words, _mm512_permutexvar_epi8(order, _mm512_maskz_loadu_epi8(valid, bits)));
    }

    // Selects the weights under a mask, and 0 elsewhere. Unlike a product, this leaves no NaN where an infinity is
    // masked out; small_values.h puts it there.
    MGLU_INLINE __m512i apply(std::int64_t mask, __m512i weights) const {
        return _mm512_maskz_mov_epi16(words[mask], weights);
    }
};
