// How x is kept, and how rows are divided, for products in float32. Included inside a file's own namespace, after Vec
// and Mask.

// The type in which x is kept.
template <class E>
using Operand = float;

// Converts a row of x, with zeros from `count` to `padded`.
template <class E>
void write_operands(const E* from, std::int64_t count, std::int64_t padded, float* to) {
    std::int64_t k = 0;
    for (; k + 8 <= count; k += 8) store_octets(to + k, 0, 1, load_octet(from + k));
    for (; k < padded; ++k) to[k] = k < count ? to_float(from[k]) : 0.0f;
}

// The products of neighbouring weights with x, without masks (linear.h).
constexpr std::int64_t kLinearStep = Vec::width;
MGLU_INLINE Vec multiply_add(Vec weights, const float* x, Vec sum) { return fma(weights, load(x), sum); }

template <class E>
constexpr bool kSumsValues = std::is_same_v<E, float>;

// The length of a step, in units of 8 columns. In float32 a difference is taken at each step: with steps of 32 columns,
// errors reached 1.6 times the naive layer's.
template <class E>
constexpr int kOctetsAtOnce = std::is_same_v<E, float> ? 2 : 4;
