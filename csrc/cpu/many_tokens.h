// Many tokens: n_masks + 1 blocked matrix products whose masked weights exist only in the caches. Included inside a
// file's own namespace, after terms.h.
//
// Lanes are tokens: x is transposed once for each block of tokens, and rows of W are read unchanged. A k-block is a
// range of in_features, and a panel is one or two vectors of tokens. For each block of features and each k-block,
// `write_masked_weights` writes the weights and their masked copies as float32 into L1 and L2. `multiply` adds their
// products with each panel to sums in L2. After the last k-block, `write_outputs` computes gates, values and results.
//
// Let t be the product of a whole row of W with x, and s_i the product of the weights that mask i keeps. The gate is
// s_i, and the value is t - s_i. In 16-bit types small_values.h makes this difference as exact as a separate product.
//
// In float32 an error of t would enter the gates or values of all masks. With three or more masks, t is therefore
// summed in float64, which costs as much as two products. s_i then sums the side with fewer weights, the gate's or the
// value's, so that the error of s_i is small compared with both sides. With one or two masks a float64 sum would save
// nothing, so gates and values are separate products.

#include "work_queue.h"

// The columns of a k-block, chosen so that a panel of x takes half of L1. If a float32 call fits one vector of tokens,
// k-blocks have fewer columns, so that chains of sums are shorter: BLAS libraries sum such a call in several lanes
// along k, which is more exact than one long chain.
template <class E>
constexpr std::int64_t k_block_depth(std::int64_t vecs) {
    return !std::is_same_v<E, float> ? 256 : vecs == 1 ? 32 : 128;
}
constexpr std::int64_t kMaskedRow = 256 + 16;  // floats from row to row; 256 would use only few sets of L1
constexpr std::int64_t kFeatures = 24;         // features of a block
constexpr std::int64_t kMaxTokens = 512;       // tokens of a block
constexpr std::int64_t kMaxSums = 96 * 1024;   // floats of a block's sums, 384 KB

// sums[f] += sum_k weights[f][k] * x[k], for vectors of tokens. With `first`, sums are overwritten.
template <int Features, int Vecs>
void multiply(const float* weights, std::int64_t depth, const float* x, float* sums, bool first) {
    Vec sum[Features][Vecs];
    unrolled<Features * Vecs>([&](auto i) MGLU_STEP { sum[i / Vecs][i % Vecs] = broadcast(0.0f); });
    for (std::int64_t k = 0; k < depth; ++k) {
        Vec panel[Vecs];
        unrolled<Vecs>([&](auto v) MGLU_STEP { panel[v] = load(x + (k * Vecs + v) * Vec::width); });
        unrolled<Features>([&](auto f) MGLU_STEP {
            const Vec weight = broadcast(weights[f * kMaskedRow + k]);
            unrolled<Vecs>([&](auto v) MGLU_STEP { sum[f][v] = fma(weight, panel[v], sum[f][v]); });
        });
    }
    unrolled<Features * Vecs>([&](auto i) MGLU_STEP {
        float* p = sums + i * Vec::width;
        store(p, first ? sum[i / Vecs][i % Vecs] : load(p) + sum[i / Vecs][i % Vecs]);
    });
}

// Like multiply(), but with float64 sums and for one vector of tokens. Rows of x are `stride` floats apart.
template <int Features>
void multiply_wide(const double* weights, std::int64_t depth, const float* x, std::int64_t stride, double* sums,
                   std::int64_t sums_stride, bool first) {
    Wide sum[Features];
    unrolled<Features>([&](auto f) MGLU_STEP { sum[f] = broadcast_wide(0.0); });
    for (std::int64_t k = 0; k < depth; ++k) {
        const Wide panel = widen(load(x + k * stride));
        unrolled<Features>([&](auto f)
                               MGLU_STEP { sum[f] = fma(broadcast_wide(weights[f * kMaskedRow + k]), panel, sum[f]); });
    }
    unrolled<Features>([&](auto f) MGLU_STEP {
        double* p = sums + f * sums_stride;
        store(p, first ? sum[f] : load_wide(p) + sum[f]);
    });
}

template <class E>
struct ManyTokens {
    const Forward& call;
    Activate activate;
    Differentiate differentiate;
    const float* term_weights;  // [tokens, kMaxMasks], for all tokens of the call
    std::int64_t vecs;          // vectors of a panel, which has vecs * Vec::width tokens
    std::int64_t first_token;   // first token of the block
    std::int64_t tokens;        // tokens of the block
    std::int64_t depth;         // in_features, padded to a multiple of 8
    float* x;                   // [panels][depth][tokens of a panel]

    std::int64_t panel_width() const { return vecs * Vec::width; }
    std::int64_t panels() const { return ceil_div(tokens, panel_width()); }
    bool has_value_products() const { return std::is_same_v<E, float> && call.n_masks <= 2; }
    bool has_float64_total() const { return std::is_same_v<E, float> && call.n_masks > 2; }
    // The number of float32 products. The products are either gates and values in turn, or t (unless it is in float64)
    // and then each s_i.
    std::int64_t products() const {
        return has_value_products() ? 2 * call.n_masks : call.n_masks + (has_float64_total() ? 0 : 1);
    }
    std::int64_t first_part() const { return has_float64_total() ? 0 : 1; }

    // Transposes a panel of x, with zeros past the last token and the last column. It reads 16 columns at a time, which
    // are a cache line in float32: if rows are a power of two apart, reading the next row may evict the line from L1.
    void pack_x(std::int64_t panel) const {
        const std::int64_t width = panel_width();
        float* to = x + panel * depth * width;
        const std::int64_t used = smaller(width, tokens - panel * width);
        const E* from = static_cast<const E*>(call.x) + (first_token + panel * width) * call.x_stride;
        for (std::int64_t line = 0; line < depth; line += 16) {
            const std::int64_t stop = smaller(line + 16, depth);
            for (std::int64_t t = 0; t < width; ++t) {
                for (std::int64_t k = line; k < stop; ++k) {
                    const bool within = t < used && k < call.in_features;
                    to[k * width + t] = within ? to_float(from[t * call.x_stride + k]) : 0.0f;
                }
            }
        }
    }

    bool run(WorkQueue& blocks) const {
        const std::int64_t masked = products() * kProduct;
        const std::int64_t sums = products() * panels() * kFeatures * panel_width();
        const std::int64_t wide_weights = has_float64_total() ? kProduct : 0;
        const std::int64_t wide_sums = has_float64_total() ? panels() * kFeatures * panel_width() : 0;
        const Floats scratch = allocate_floats(masked + sums + results_of(call) * kFeatures * panel_width());
        const Floats wide = allocate_floats(2 * (wide_weights + wide_sums));
        if (!scratch || !wide) return false;
        auto* doubles = reinterpret_cast<double*>(wide.get());
        const Block block{scratch.get(), scratch.get() + masked, scratch.get() + masked + sums, doubles,
                          doubles + wide_weights};
        blocks.for_each([&](std::int64_t i) { run_block(i * kFeatures, block); });
        return true;
    }

    static constexpr std::int64_t kProduct = kFeatures * kMaskedRow;

    struct Block {
        float* weights;        // [product][feature][kMaskedRow]
        float* sums;           // [product][panel][feature][token]
        float* results;        // [result][feature][token] of a panel
        double* wide_weights;  // [feature][kMaskedRow], unmasked
        double* wide_sums;     // [panel][feature][token]
    };

    void run_block(std::int64_t first_feature, const Block& block) const {
        const std::int64_t features = smaller(kFeatures, call.out_features - first_feature);
        std::uint8_t flips[kFeatures][kMaxMasks + 1] = {};
        if (has_float64_total()) choose_complements(first_feature, features, flips);
        const std::int64_t max_k_block = k_block_depth<E>(vecs);
        for (std::int64_t k = 0; k < depth; k += max_k_block) {
            const std::int64_t k_block = smaller(max_k_block, depth - k);
            for (std::int64_t f = 0; f < features; ++f)
                write_masked_weights(first_feature + f, k, k_block, flips[f], block, f);
            for (std::int64_t panel = 0; panel < panels(); ++panel) {
                const float* x_panel = x + (panel * depth + k) * panel_width();
                for (std::int64_t product = 0; product < products(); ++product) {
                    multiply_block(block.weights + product * kProduct, features, k_block, x_panel,
                                   sums_at(block, product, panel), k == 0);
                }
                if (has_float64_total()) add_to_total(block, features, k_block, x_panel, panel, k == 0);
            }
        }
        for (std::int64_t panel = 0; panel < panels(); ++panel)
            write_outputs(first_feature, features, panel, flips, block);
    }

    void add_to_total(const Block& block, std::int64_t features, std::int64_t k_block, const float* x_panel,
                      std::int64_t panel, bool first) const {
        for (std::int64_t f = 0; f < features; f += kFloat64Features) {
            for (std::int64_t t = 0; t < panel_width(); t += Vec::width) {
                multiply_wide<kFloat64Features>(block.wide_weights + f * kMaskedRow, k_block, x_panel + t,
                                                panel_width(), wide_sums_at(block, panel) + f * panel_width() + t,
                                                panel_width(), first);
            }
        }
    }

    double* wide_sums_at(const Block& block, std::int64_t panel) const {
        return block.wide_sums + panel * kFeatures * panel_width();
    }

    float* sums_at(const Block& block, std::int64_t product, std::int64_t panel) const {
        return block.sums + (product * panels() + panel) * kFeatures * panel_width();
    }

    void multiply_block(const float* weights, std::int64_t features, std::int64_t k_block, const float* panel,
                        float* sums, bool first) const {
        constexpr int kWide = kTileFeatures;
        const std::int64_t step = vecs == 2 ? kWide : 12;
        for (std::int64_t f = 0; f < features; f += step) {  // sums past the last feature are never read
            const float* rows = weights + f * kMaskedRow;
            float* tile = sums + f * panel_width();
            if (vecs == 2) {
                multiply<kWide, 2>(rows, k_block, panel, tile, first);
            } else {
                multiply<12, 1>(rows, k_block, panel, tile, first);
            }
        }
    }

    // Sets `flips` to 255 for each row and mask with more ones than zeros, so that s_i sums the weights under the
    // zeros. It estimates the number of ones from at most 64 bytes spread over the row. An estimate errs only if about
    // half of the bits are ones, and then both sides are equally accurate.
    void choose_complements(std::int64_t first_feature, std::int64_t features,
                            std::uint8_t (*flips)[kMaxMasks + 1]) const {
        const std::int64_t octets = packed_octets(call.in_features), step = ceil_div(octets, 64);
        for (std::int64_t f = 0; f < features; ++f) {
            const std::uint8_t* row = call.packed_masks + (first_feature + f) * call.mask_stride;
            int ones[kMaxMasks] = {}, seen = 0;
            for (std::int64_t octet = 0; octet < octets; octet += step, seen += 8) {
                for (std::int64_t i = 0; i < call.n_masks; ++i) {
                    ones[i] += __builtin_popcount(row[octet * call.n_masks + i]);
                }
            }
            for (std::int64_t i = 0; i < call.n_masks; ++i) flips[f][i] = 2 * ones[i] > seen ? 255 : 0;
        }
    }

    // Writes a k-block of one row as feature f of the block, masked for each product and unmasked for t.
    void write_masked_weights(std::int64_t row, std::int64_t k, std::int64_t k_block, const std::uint8_t* flips,
                              const Block& block, std::int64_t f) const {
        const E* weights = static_cast<const E*>(call.weight) + row * call.weight_stride + k;
        const std::uint8_t* bits = call.packed_masks + row * call.mask_stride + mask_bytes(k, call.n_masks);
        const std::int64_t whole = smaller(k_block, call.in_features - k) / 8 * 8;
        float* to = block.weights + f * kMaskedRow;
        for (std::int64_t i = 0; i < whole; i += 8, bits += call.n_masks) {
            mask_octet(load_octet(weights + i), bits, flips, to + i);
        }
        E last[8] = {};
        if (whole < k_block) {
            for (std::int64_t i = whole; i < call.in_features - k; ++i) last[i - whole] = weights[i];
            mask_octet(load_octet(last), bits, flips, to + whole);
        }
        if (!has_float64_total()) return;
        double* wide = block.wide_weights + f * kMaskedRow;
        for (std::int64_t i = 0; i < whole; ++i) wide[i] = static_cast<double>(to_float(weights[i]));
        for (std::int64_t i = whole; i < k_block; ++i) wide[i] = static_cast<double>(to_float(last[i - whole]));
    }

    void mask_octet(Vec weights, const std::uint8_t* bits, const std::uint8_t* flips, float* to) const {
        if (has_value_products()) {
            for (std::int64_t i = 0; i < call.n_masks; ++i, to += 2 * kProduct) {
                store_octets(to, 0, 1, apply_mask(weights, load_mask<1>(bits + i, 0)));
                store_octets(to + kProduct, 0, 1, apply_mask(weights, load_mask<1>(bits + i, 255)));
            }
            return;
        }
        if (!has_float64_total()) store_octets(to, 0, 1, weights);
        to += first_part() * kProduct;
        std::int64_t i = 0;
        for (; i + kMasksPerVec <= call.n_masks; i += kMasksPerVec, to += kMasksPerVec * kProduct) {
            const Mask mask = load_mask<kMasksPerVec>(bits + i, load_flips<kMasksPerVec>(flips + i));
            store_octets(to, kProduct, kMasksPerVec, apply_mask(weights, mask));
        }
        if (i < call.n_masks) store_octets(to, 0, 1, apply_mask(weights, load_mask<1>(bits + i, flips[i])));
    }

    template <int Count>
    static std::uint32_t load_flips(const std::uint8_t* flips) {
        return Count == 1 ? flips[0] : flips[0] | static_cast<std::uint32_t>(flips[1]) << 8;
    }

    // Returns the gates and values of one vector of tokens. `at` is the vector's offset in the sums of a panel, and
    // `first` holds the token, row and mask of the first lane.
    GateAndValue gate_and_value(const Block& block, std::int64_t panel, std::int64_t at, const MaskedSum& first) const {
        const std::int64_t i = first.mask;
        if (has_value_products()) {
            return {load(sums_at(block, 2 * i, panel) + at), load(sums_at(block, 2 * i + 1, panel) + at)};
        }
        Vec part = load(sums_at(block, first_part() + i, panel) + at), rest;
        if (has_float64_total()) {
            const Wide total = load_wide(wide_sums_at(block, panel) + at);
            const Vec near = narrow(total);
            rest = (near - part) + narrow(total - widen(near));
        } else {
            rest = load(sums_at(block, 0, panel) + at) - part;
        }
        mend_small_rests<E>(call, part, rest, [&](int lane) {
            const std::int64_t token = first.token + lane;
            return MaskedSum{token < call.tokens ? token : -1, first.row, i, first.flip};
        });
        return first.flip ? GateAndValue{rest, part} : GateAndValue{part, rest};
    }

    void write_outputs(std::int64_t first_feature, std::int64_t features, std::int64_t panel,
                       const std::uint8_t (*flips)[kMaxMasks + 1], const Block& block) const {
        const std::int64_t width = panel_width(), token = first_token + panel * width;
        const std::int64_t used = smaller(width, first_token + tokens - token);
        alignas(64) float mask_weight_lanes[kMaxMasks][2 * Vec::width] = {};
        for (std::int64_t i = 0; i < call.n_masks; ++i) {
            for (std::int64_t t = 0; t < used; ++t) mask_weight_lanes[i][t] = term_weights[(token + t) * kMaxMasks + i];
        }
        for (std::int64_t f = 0; f < features; ++f) {
            for (std::int64_t v = 0; v < width; v += Vec::width) {
                const std::int64_t at = f * width + v;
                const Vec scale = broadcast(row_scale(call, first_feature + f));
                const auto terms = [&](std::int64_t i) MGLU_STEP {
                    const auto [gate, value] =
                        gate_and_value(block, panel, at, {token + v, first_feature + f, i, flips[f][i]});
                    return GateAndValue{gate * scale, value * scale};
                };
                const auto mask_weight = [&](std::int64_t i) MGLU_STEP { return load(mask_weight_lanes[i] + v); };
                sum_terms<E>(call, activate, differentiate, terms, mask_weight, block.results + at, kFeatures * width);
            }
        }
        for (std::int64_t result = 0; result < results_of(call); ++result) {
            alignas(64) float rows[2 * Vec::width][kPaddedFeatures];
            transpose_results(block.results + result * kFeatures * width, width, rows);
            for (std::int64_t t = 0; t < used; ++t) {
                E* to = result_row<E>(call, result, token + t) + first_feature;
                for (std::int64_t f = 0; f < features; ++f) to[f] = from_float<E>(rows[t][f]);
            }
        }
    }

    static constexpr std::int64_t kPaddedFeatures = ceil_div(kFeatures, Vec::width) * Vec::width;

    // Transposes a panel's results from [feature][token] to [token][feature]. The padding repeats the last feature.
    static void transpose_results(const float* results, std::int64_t width, float (*rows)[kPaddedFeatures]) {
        for (std::int64_t v = 0; v < width; v += Vec::width) {
            for (std::int64_t f = 0; f < kPaddedFeatures; f += Vec::width) {
                Vec tile[Vec::width];
                unrolled<Vec::width>(
                    [&](auto i) MGLU_STEP { tile[i] = load(results + smaller(f + i, kFeatures - 1) * width + v); });
                transpose(tile);
                unrolled<Vec::width>([&](auto i) MGLU_STEP { store(rows[v + i] + f, tile[i]); });
            }
        }
    }
};

template <class E>
Status forward_many(const Forward& call, ParallelFor parallel_for, const float* term_weights) {
    const std::int64_t vecs = call.tokens <= Vec::width ? 1 : 2, width = vecs * Vec::width;
    const std::int64_t fitting = kMaxSums / ((call.n_masks + 2) * kFeatures * width) * width;
    const std::int64_t block = smaller(smaller(kMaxTokens, fitting), ceil_div(call.tokens, width) * width);
    const std::int64_t depth = packed_octets(call.in_features) * kOctet;
    const Floats x = allocate_floats(block * depth);
    if (!x) return Status::out_of_memory;
    for (std::int64_t first = 0; first < call.tokens; first += block) {
        const std::int64_t tokens = smaller(block, call.tokens - first);
        const ManyTokens<E> job{call,
                                activation_of(call.activation),
                                derivative_of(call.activation),
                                term_weights,
                                vecs,
                                first,
                                tokens,
                                depth,
                                x.get()};
        const std::int64_t panel_products = depth * width;
        const std::int64_t block_products = kFeatures * call.in_features * (call.n_masks + 1) * tokens;
        const Status status =
            pack_and_run(parallel_for, job, job.panels(), ceil_div(kProductsPerTask, panel_products + 1),
                         ceil_div(call.out_features, kFeatures), ceil_div(kProductsPerTask, block_products + 1));
        if (status != Status::ok) return status;
    }
    return Status::ok;
}
