// The masks of 32 weights as 32-bit k-registers, for 16-bit weights. Included inside a file's own namespace, below the
// target pragma.

// order[n_masks] is the permutation that gathers each mask's four bytes, which are n_masks apart in the packed format.
struct ByteOrders {
    alignas(64) std::uint8_t order[kMaxMasks + 1][64];
    constexpr ByteOrders() : order() {
        for (int n = 1; n <= kMaxMasks; ++n) {
            for (int i = 0; i < 4 * n; ++i) order[n][i] = static_cast<std::uint8_t>(i % 4 * n + i / 4);
        }
    }
};
static constexpr ByteOrders kByteOrders;

// A k-register of 64 or 32 lanes whose first `count` bits are set; all of them if `count` is larger.
MGLU_INLINE __mmask64 first_bytes(std::int64_t count) { return count < 64 ? (1ull << count) - 1 : ~0ull; }
MGLU_INLINE __mmask32 first_words(std::int64_t count) { return count < 32 ? (1u << count) - 1 : ~0u; }

MGLU_INLINE __m512i byte_order(std::int64_t n_masks) { return _mm512_loadu_si512(kByteOrders.order[n_masks]); }

struct MaskWords {
    alignas(64) std::uint32_t words[kMaxMasks];

    // Loads the bytes at `bits` that `valid` selects. The others are not read and count as 0.
    MGLU_INLINE MaskWords(const std::uint8_t* bits, __mmask64 valid, __m512i order) {
        _mm512_storeu_si512(words, _mm512_permutexvar_epi8(order, _mm512_maskz_loadu_epi8(valid, bits)));
    }

    // Keeps the weights under a mask and clears the others. Unlike a multiplication, this gives no NaN for a masked-out
    // infinity; small_values.h adds that NaN.
    MGLU_INLINE __m512i apply(std::int64_t mask, __m512i weights) const {
        return _mm512_maskz_mov_epi16(words[mask], weights);
    }
};
