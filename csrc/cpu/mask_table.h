// The masks of eight weights, all by table. Included inside a file's own namespace, below mask_factors.h.

template <int Masks>
struct TableMasks {
    const std::uint8_t* bits;

    MGLU_INLINE explicit TableMasks(const std::uint8_t* of_octet) : bits(of_octet) {}

    // sum + (the products under mask v).
    MGLU_INLINE Vec add(int v, Vec sum, Vec product) const { return fma(product, load_mask<1>(bits + v, 0), sum); }
    // The sum that `add` has made.
    MGLU_INLINE static Vec sum_of(int, Vec sum) { return sum; }
};
