// Recomputes differences that have lost significant digits. Included inside a file's own namespace, after Vec and Mask.
//
// The kernels compute the sum t over a whole row, and for each mask the sum s of the products that the mask keeps. The
// sum of the other products, the rest, is t - s and has the rounding error of t. The rounding of a 16-bit result hides
// this error unless the rest is much smaller than s. A rest that is too small, or not finite, is summed again from its
// own products alone, so that a large s can neither round it away nor make it overflow. With ordinary data, one rest in
// 6000 is summed again in bfloat16, and one in 800 in the other types.

// A rest is kept if it is at least this fraction of s. The fraction is smaller in bfloat16, whose results have three
// bits fewer than float16's. In float32 it bounds the relative error of a rest by 2^-15.
template <class E>
constexpr float kLeastRest = std::is_same_v<E, BFloat16> ? 0x1p-12f : 0x1p-9f;

// Identifies one sum by its token, row of W and mask. `flip` is 0, or 255 for the complement of the mask.
struct MaskedSum {
    std::int64_t token, row, mask;
    std::uint32_t flip;
};

// Sums the products of one MaskedSum alone. It multiplies by the mask bits, so that infinity and NaN have the same
// effect as in the naive layer. With `skips_zeros`, which is valid if x and W are finite, it skips octets without a
// product to sum. If a mask is nearly all ones, these are most octets of its rest.
template <class E, class W>
float sum_apart(const Forward& call, const MaskedSum& sum, bool skips_zeros) {
    const E* x = static_cast<const E*>(call.x) + sum.token * call.x_stride;
    const W* weights = static_cast<const W*>(call.weight) + sum.row * call.weight_stride;
    const std::uint8_t* bits = call.packed_masks + sum.row * call.mask_stride + sum.mask;
    const std::int64_t whole = call.in_features / kOctet, rest = call.in_features % kOctet;
    const auto add = [&](Vec& to, std::int64_t octet, const W* eight_weights, const E* eight_x) MGLU_STEP {
        const std::uint8_t* byte = bits + octet * call.n_masks;
        if (skips_zeros && *byte == sum.flip) return;
        to = to + apply_mask(load_octet(eight_weights), load_mask<1>(byte, sum.flip)) * load_octet(eight_x);
    };
    constexpr int kChains = 4;  // hide the latency of an addition
    Vec sums[kChains];
    unrolled<kChains>([&](auto c) MGLU_STEP { sums[c] = broadcast(0.0f); });
    std::int64_t octet = 0;
    for (; octet + kChains <= whole; octet += kChains) {
        unrolled<kChains>([&](auto c)
                              MGLU_STEP { add(sums[c], octet + c, weights + 8 * (octet + c), x + 8 * (octet + c)); });
    }
    for (; octet < whole; ++octet) add(sums[0], octet, weights + 8 * octet, x + 8 * octet);
    if (rest) {
        W last_weights[kOctet] = {};
        E last_x[kOctet] = {};
        for (std::int64_t i = 0; i < rest; ++i) last_weights[i] = weights[8 * whole + i], last_x[i] = x[8 * whole + i];
        add(sums[0], whole, last_weights, last_x);
    }
    float lanes[Vec::width];
    store(lanes, (sums[0] + sums[1]) + (sums[2] + sums[3]));
    float result = 0.0f;
    for (int lane = 0; lane < 8; ++lane) result += lanes[lane];
    return result;
}

// Recomputes the lanes whose bits are set in `lanes`. `sum_of_lane(lane)` returns the lane's MaskedSum; its token is -1
// if the lane is not needed, and the sum is then 0.
template <class E, class W, class SumOfLane>
__attribute__((noinline)) void sum_lanes_apart(const Forward& call, std::uint32_t lanes, Vec& sum, Vec& rest,
                                               SumOfLane sum_of_lane) {
    float sums[Vec::width], rests[Vec::width];
    store(sums, sum);
    store(rests, rest);
    for (int lane = 0; lane < Vec::width; ++lane) {
        if (!(lanes >> lane & 1)) continue;
        MaskedSum at = sum_of_lane(lane);
        const bool is_needed = at.token >= 0, is_finite = rests[lane] - rests[lane] == 0.0f;
        if (!is_finite) sums[lane] = is_needed ? sum_apart<E, W>(call, at, false) : 0.0f;
        at.flip ^= 255;
        rests[lane] = is_needed ? sum_apart<E, W>(call, at, is_finite) : 0.0f;
    }
    sum = load(sums);
    rest = load(rests);
}

// Recomputes the rests that are too small or not finite. E is the type of x, W the type of the weights.
template <class E, class W = E, class SumOfLane>
MGLU_INLINE void mend_small_rests(const Forward& call, Vec& sum, Vec& rest, SumOfLane sum_of_lane) {
    const Vec size = abs(rest);
    const std::uint32_t lost =
        lanes_below(size, abs(sum) * broadcast(kLeastRest<E>)) | lanes_below(broadcast(0x1.fffffep127f), size);
    if (__builtin_expect(lost != 0, 0)) sum_lanes_apart<E, W>(call, lost, sum, rest, sum_of_lane);
}
