// Masks for CPUs without mask registers: a byte selects eight factors, each 0 or 1, from a table of 8 KB, which stays
// in L1. Included inside a file's own namespace, after a Vec of eight lanes.
//
// Infinity times the factor 0 is NaN, as in the naive layer, which multiplies by the mask.

constexpr int kMasksPerVec = 1;

struct Factors {
    alignas(64) float of_byte[256][8];
    constexpr Factors() : of_byte() {
        for (int byte = 0; byte < 256; ++byte) {
            for (int bit = 0; bit < 8; ++bit) of_byte[byte][bit] = static_cast<float>(mask_bit(byte, bit));
        }
    }
};
static constexpr Factors kFactors;

using Mask = Vec;

// Loads the factors of the byte at `bits`. `flip` is 0, or 255 for the complement of the mask.
template <int Count>
MGLU_INLINE Mask load_mask(const std::uint8_t* bits, std::uint32_t flip) {
    static_assert(Count == 1);
    return load(kFactors.of_byte[*bits ^ flip]);
}
MGLU_INLINE Vec apply_mask(Vec a, Mask mask) { return a * mask; }
// Returns a vector with numbers[0] in every lane, since a Vec holds only one mask here.
MGLU_INLINE Vec broadcast_each(const float* numbers) { return broadcast(*numbers); }
// Stores the eight lanes, the only group of a Vec here, at p.
MGLU_INLINE void store_octets(float* p, std::int64_t, int, Vec a) { store(p, a); }
// Sums a vector over its masks; the results are in the first eight lanes.
MGLU_INLINE Vec sum_over_masks(Vec a) { return a; }

// The masks of eight weights.
template <int Masks>
struct TableMasks {
    const std::uint8_t* bits;

    MGLU_INLINE explicit TableMasks(const std::uint8_t* octet_bits) : bits(octet_bits) {}

    // Adds the products that mask v keeps to `sum`.
    MGLU_INLINE Vec add(int v, Vec sum, Vec product) const { return fma(product, load_mask<1>(bits + v, 0), sum); }
    // Returns the sum of mask v, given its accumulator. Here they are equal; mask_table_and_shift.h halves some.
    MGLU_INLINE static Vec finished_sum(int, Vec sum) { return sum; }
};
