// Masks where there are no mask registers: a byte picks eight factors, 0 or 1, from a table of 8 KB (in L1).
// Included inside a file's own namespace, below an eight-lane Vec.
//
// A product with 0 and 1 is what the naive layer does, so that infinity times a masked-out weight is NaN here as there.

constexpr int kMasksPerVec = 1;

struct Factors {
    alignas(64) float of_byte[256][8];
    constexpr Factors() : of_byte() {
        for (int byte = 0; byte < 256; ++byte) {
            for (int bit = 0; bit < 8; ++bit) of_byte[byte][bit] = static_cast<float>(byte >> bit & 1);
        }
    }
};
static constexpr Factors kFactors;

using Mask = Vec;

// Of the byte at `bits`; `flip` is 0, or 255 for the complement.
template <int Count>
MGLU_INLINE Mask load_mask(const std::uint8_t* bits, std::uint32_t flip) {
    static_assert(Count == 1);
    return load(kFactors.of_byte[*bits ^ flip]);
}
MGLU_INLINE Vec apply_mask(Vec a, Mask mask) { return a * mask; }
// A number for each mask of a vector.
MGLU_INLINE Vec broadcast_each(const float* numbers) { return broadcast(*numbers); }
// The first `count` groups of eight lanes to p, p + stride, ...
MGLU_INLINE void store_octets(float* p, std::int64_t, int, Vec a) { store(p, a); }
// Sums over the masks of a vector, in its first eight lanes.
MGLU_INLINE Vec sum_over_masks(Vec a) { return a; }
// The gate as the naive layer has it: a product with 0 has made it so.
MGLU_INLINE Vec poisoned(Vec gate, Vec) { return gate; }
