// How the kernels that multiply in float32 store x, and the length of their steps. Included inside a file's own
// namespace, after Vec and Mask.

// The type of x as the kernel reads it.
template <class E>
using Operand = float;

// Converts a row of x of `count` elements, and pads it with zeros to `padded` elements.
template <class E>
void write_operands(const E* from, std::int64_t count, std::int64_t padded, float* to) {
    std::int64_t k = 0;
    for (; k + 8 <= count; k += 8) store_octets(to + k, 0, 1, load_octet(from + k));
    for (; k < padded; ++k) to[k] = k < count ? to_float(from[k]) : 0.0f;
}

// One step of the product without masks (linear.h): kLinearStep weights times x, added to `sum`.
constexpr std::int64_t kLinearStep = Vec::width;
MGLU_INLINE Vec multiply_add(Vec weights, const float* x, Vec sum) { return fma(weights, load(x), sum); }

template <class E>
constexpr bool kSumsValues = std::is_same_v<E, float>;

// Octets (groups of 8 columns) in a step. In float32 row_sums.h computes `total - part` once per step, so steps are
// short: with 32 columns instead of 16, errors reached 1.6 times the naive layer's.
template <class E>
constexpr int kOctetsAtOnce = std::is_same_v<E, float> ? 2 : 4;
