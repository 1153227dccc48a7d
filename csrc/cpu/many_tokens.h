// Many tokens: a blocked matrix product of n_masks + 1 products, whose masked weights exist only in the caches.
// Included inside a file's own namespace, below Vec and Mask.
//
// Lanes are tokens, so that rows of W are unpacked as they lie, without a transposition: x is transposed instead, once
// for a block of tokens. For a block of features and a stretch of in_features, `unpack` writes the weights and their
// masked copies as float32 (into L1 and L2), `multiply` adds their products with each panel of tokens to sums in L2,
// and after the last stretch `finish` makes gates, values and results of them.
//
// With t the product of the whole row and s_i that of a part, gate and value are s_i and t - s_i, which 16-bit types
// cannot tell from products of their own. In float32 they can: an error of t would be in the gates or values of all
// masks. There t is summed in float64, at the price of two products, and s_i is the part of fewer weights, gate or
// value, so that its error is small beside both. With one and two masks that saves nothing: gates and values are
// products of their own.

// Of a stretch: a panel of x is half of L1. For a handful of tokens libraries sum float32 by lanes along k, which is
// more exact than a long chain; sums of short stretches are as exact.
template <class E>
constexpr std::int64_t depth_of_stretch(std::int64_t vecs) {
    return !std::is_same_v<E, float> ? 256 : vecs == 1 ? 32 : 128;
}
constexpr std::int64_t kMaskedRow = 256 + 16;  // floats; rows a power of two apart would share few sets of L1
constexpr std::int64_t kFeatures = 24;         // of a block
constexpr std::int64_t kMaxTokens = 512;       // of a block
constexpr std::int64_t kMaxSums = 96 * 1024;   // floats of a block's sums, 384 KB

// sums[f] (+)= sum_k weights[f][k] * x[k], a vector of tokens each.
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

// The same with sums in float64, for one vector of the `stride` floats of a line of x.
template <int Features>
void multiply_wide(const double* weights, std::int64_t depth, const float* x, std::int64_t stride, double* sums,
                   std::int64_t sums_stride, bool first) {
    Wide sum[Features];
    unrolled<Features>([&](auto f) MGLU_STEP { sum[f] = broadcast_wide(0.0); });
    for (std::int64_t k = 0; k < depth; ++k) {
        const Wide panel = widen(load(x + k * stride));
        unrolled<Features>([&](auto f) MGLU_STEP {
            sum[f] = fma(broadcast_wide(weights[f * kMaskedRow + k]), panel, sum[f]);
        });
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
    const float* routes;       // [tokens, kMaxMasks] of the whole call
    std::int64_t vecs;         // of a panel: its tokens are vecs * Vec::width
    std::int64_t first_token;  // of the block
    std::int64_t tokens;       // of the block
    std::int64_t depth;        // in_features, padded to whole octets
    float* x;                  // [panels][depth][tokens of a panel]
    bool* out_of_memory;

    std::int64_t panel_width() const { return vecs * Vec::width; }
    std::int64_t panels() const { return ceil_div(tokens, panel_width()); }
    bool has_own_values() const { return std::is_same_v<E, float> && call.n_masks <= 2; }
    bool has_wide_total() const { return std::is_same_v<E, float> && call.n_masks > 2; }
    // Of float32 sums: gates and values by turns; or parts, after the total where it is not a wide one.
    std::int64_t products() const {
        return has_own_values() ? 2 * call.n_masks : call.n_masks + (has_wide_total() ? 0 : 1);
    }
    std::int64_t first_part() const { return has_wide_total() ? 0 : 1; }

    // A panel of x, transposed; zeros stand for tokens past the end and for in_features past theirs. 16 columns at a time,
    // a whole line of float32: where rows are a power of two apart, lines of 16 tokens do not stay in L1 together.
    void pack(std::int64_t panel) const {
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

    void run(WorkQueue& blocks) const {
        const std::int64_t masked = products() * kProduct;
        const std::int64_t sums = products() * panels() * kFeatures * panel_width();
        const std::int64_t wide_weights = has_wide_total() ? kProduct : 0;
        const std::int64_t wide_sums = has_wide_total() ? panels() * kFeatures * panel_width() : 0;
        const Floats scratch = allocate_floats(masked + sums + panel_width() * kFeatures);
        const Floats wide = allocate_floats(2 * (wide_weights + wide_sums));
        if (!scratch || !wide) {
            __atomic_store_n(out_of_memory, true, __ATOMIC_RELAXED);
            return;
        }
        auto* doubles = reinterpret_cast<double*>(wide.get());
        const Block block{scratch.get(), scratch.get() + masked, scratch.get() + masked + sums, doubles,
                          doubles + wide_weights};
        blocks.take([&](std::int64_t i) { run_block(i * kFeatures, block); });
    }

    static constexpr std::int64_t kProduct = kFeatures * kMaskedRow;

    struct Block {
        float* weights;  // [product][feature][kMaskedRow]
        float* sums;     // [product][panel][feature][token]
        float* results;  // [feature][token] of a panel
        double* wide_weights;  // [feature][kMaskedRow], unmasked
        double* wide_sums;     // [panel][feature][token]
    };

    void run_block(std::int64_t first_feature, const Block& block) const {
        const std::int64_t features = smaller(kFeatures, call.out_features - first_feature);
        std::uint8_t flips[kFeatures][kMaxMasks + 1] = {};
        if (has_wide_total()) choose_parts(first_feature, features, flips);
        const std::int64_t whole_stretch = depth_of_stretch<E>(vecs);
        for (std::int64_t k = 0; k < depth; k += whole_stretch) {
            const std::int64_t stretch = smaller(whole_stretch, depth - k);
            for (std::int64_t f = 0; f < features; ++f) unpack(first_feature + f, k, stretch, flips[f], block, f);
            for (std::int64_t panel = 0; panel < panels(); ++panel) {
                const float* panel_of_x = x + (panel * depth + k) * panel_width();
                for (std::int64_t product = 0; product < products(); ++product) {
                    multiply_block(block.weights + product * kProduct, features, stretch, panel_of_x,
                                   sums_of(block, product, panel), k == 0);
                }
                if (has_wide_total()) add_to_total(block, features, stretch, panel_of_x, panel, k == 0);
            }
        }
        for (std::int64_t panel = 0; panel < panels(); ++panel) finish(first_feature, features, panel, flips, block);
    }

    void add_to_total(const Block& block, std::int64_t features, std::int64_t stretch, const float* panel_of_x,
                      std::int64_t panel, bool first) const {
        for (std::int64_t f = 0; f < features; f += kFeaturesOfWideSums) {
            for (std::int64_t t = 0; t < panel_width(); t += Vec::width) {
                multiply_wide<kFeaturesOfWideSums>(block.wide_weights + f * kMaskedRow, stretch, panel_of_x + t,
                                                   panel_width(), wide_sums_of(block, panel) + f * panel_width() + t,
                                                   panel_width(), first);
            }
        }
    }

    double* wide_sums_of(const Block& block, std::int64_t panel) const {
        return block.wide_sums + panel * kFeatures * panel_width();
    }

    float* sums_of(const Block& block, std::int64_t product, std::int64_t panel) const {
        return block.sums + (product * panels() + panel) * kFeatures * panel_width();
    }

    void multiply_block(const float* weights, std::int64_t features, std::int64_t stretch, const float* panel,
                        float* sums, bool first) const {
        constexpr int kWide = kFeaturesOfWideTile;
        const std::int64_t step = vecs == 2 ? kWide : 12;
        for (std::int64_t f = 0; f < features; f += step) {  // past the last feature: rows whose sums nobody reads
            const float* rows = weights + f * kMaskedRow;
            float* tile = sums + f * panel_width();
            if (vecs == 2) {
                multiply<kWide, 2>(rows, stretch, panel, tile, first);
            } else {
                multiply<12, 1>(rows, stretch, panel, tile, first);
            }
        }
    }

    // 255 where a mask has more ones than zeros in a row, judged by 64 octets spread over it: a wrong guess near half
    // costs no accuracy.
    void choose_parts(std::int64_t first_feature, std::int64_t features, std::uint8_t (*flips)[kMaxMasks + 1]) const {
        const std::int64_t octets = ceil_div(call.in_features, 8), step = ceil_div(octets, 64);
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

    // A stretch of one row, as feature f of the block: masked for each product, and whole for the total.
    void unpack(std::int64_t row, std::int64_t k, std::int64_t stretch, const std::uint8_t* flips, const Block& block,
                std::int64_t f) const {
        const E* weights = static_cast<const E*>(call.weight) + row * call.weight_stride + k;
        const std::uint8_t* bits = call.packed_masks + row * call.mask_stride + k / 8 * call.n_masks;
        const std::int64_t whole = smaller(stretch, call.in_features - k) / 8 * 8;
        float* to = block.weights + f * kMaskedRow;
        for (std::int64_t i = 0; i < whole; i += 8, bits += call.n_masks) {
            unpack_octet(load_octet(weights + i), bits, flips, to + i);
        }
        E last[8] = {};
        if (whole < stretch) {
            for (std::int64_t i = whole; i < call.in_features - k; ++i) last[i - whole] = weights[i];
            unpack_octet(load_octet(last), bits, flips, to + whole);
        }
        if (!has_wide_total()) return;
        double* wide = block.wide_weights + f * kMaskedRow;
        for (std::int64_t i = 0; i < whole; ++i) wide[i] = static_cast<double>(to_float(weights[i]));
        for (std::int64_t i = whole; i < stretch; ++i) wide[i] = static_cast<double>(to_float(last[i - whole]));
    }

    void unpack_octet(Vec weights, const std::uint8_t* bits, const std::uint8_t* flips, float* to) const {
        if (has_own_values()) {
            for (std::int64_t i = 0; i < call.n_masks; ++i, to += 2 * kProduct) {
                store_octets(to, 0, 1, apply_mask(weights, load_mask<1>(bits + i, 0)));
                store_octets(to + kProduct, 0, 1, apply_mask(weights, load_mask<1>(bits + i, 255)));
            }
            return;
        }
        if (!has_wide_total()) store_octets(to, 0, 1, weights);
        to += first_part() * kProduct;
        std::int64_t i = 0;
        for (; i + kMasksPerVec <= call.n_masks; i += kMasksPerVec, to += kMasksPerVec * kProduct) {
            const Mask mask = load_mask<kMasksPerVec>(bits + i, flips_of<kMasksPerVec>(flips + i));
            store_octets(to, kProduct, kMasksPerVec, apply_mask(weights, mask));
        }
        if (i < call.n_masks) store_octets(to, 0, 1, apply_mask(weights, load_mask<1>(bits + i, flips[i])));
    }

    template <int Count>
    static std::uint32_t flips_of(const std::uint8_t* flips) {
        return Count == 1 ? flips[0] : flips[0] | static_cast<std::uint32_t>(flips[1]) << 8;
    }

    struct GateAndValue {
        Vec gate, value;
    };

    GateAndValue gate_and_value(const Block& block, std::int64_t panel, std::int64_t at, std::int64_t i,
                                bool flipped) const {
        if (has_own_values()) {
            return {load(sums_of(block, 2 * i, panel) + at), load(sums_of(block, 2 * i + 1, panel) + at)};
        }
        const Vec part = load(sums_of(block, first_part() + i, panel) + at);
        if (!has_wide_total()) return {part, load(sums_of(block, 0, panel) + at) - part};
        const Wide total = load_wide(wide_sums_of(block, panel) + at);
        const Vec near = narrow(total), rest = (near - part) + narrow(total - widen(near));
        return flipped ? GateAndValue{rest, part} : GateAndValue{part, rest};
    }

    void finish(std::int64_t first_feature, std::int64_t features, std::int64_t panel,
                const std::uint8_t (*flips)[kMaxMasks + 1], const Block& block) const {
        const std::int64_t width = panel_width(), token = first_token + panel * width;
        const std::int64_t used = smaller(width, first_token + tokens - token);
        alignas(64) float route_lanes[kMaxMasks][2 * Vec::width] = {};
        for (std::int64_t i = 0; i < call.n_masks; ++i) {
            for (std::int64_t t = 0; t < used; ++t) route_lanes[i][t] = routes[(token + t) * kMaxMasks + i];
        }
        for (std::int64_t f = 0; f < features; ++f) {
            for (std::int64_t v = 0; v < width; v += Vec::width) {
                Vec sum = broadcast(0.0f);
                for (std::int64_t i = 0; i < call.n_masks; ++i) {
                    const auto [gate, value] = gate_and_value(block, panel, f * width + v, i, flips[f][i]);
                    sum = sum + activate(gate) * load(route_lanes[i] + v) * value;
                }
                store(block.results + f * width + v, sum);
            }
        }
        for (std::int64_t t = 0; t < used; ++t) {
            E* out = static_cast<E*>(call.out) + (token + t) * call.out_stride + first_feature;
            for (std::int64_t f = 0; f < features; ++f) out[f] = from_float<E>(block.results[f * width + t]);
        }
    }
};

template <class E>
Status forward_many(const Forward& call, ParallelFor parallel_for, const float* routes) {
    const std::int64_t vecs = call.tokens <= Vec::width ? 1 : 2, width = vecs * Vec::width;
    const std::int64_t fitting = kMaxSums / ((call.n_masks + 2) * kFeatures * width) * width;
    const std::int64_t block = smaller(smaller(kMaxTokens, fitting), ceil_div(call.tokens, width) * width);
    const std::int64_t depth = ceil_div(call.in_features, 8) * 8;
    const Floats x = allocate_floats(block * depth);
    if (!x) return Status::out_of_memory;
    bool out_of_memory = false;
    using Job = ManyTokens<E>;
    for (std::int64_t first = 0; first < call.tokens; first += block) {
        const Job job{call,  activation_of(call.activation), routes, vecs, first, smaller(block, call.tokens - first),
                      depth, x.get(), &out_of_memory};
        const std::int64_t of_panel = depth * width;
        const std::int64_t of_block = kFeatures * call.in_features * (call.n_masks + 1) * job.tokens;
        const Status status = pack_and_run(parallel_for, job, job.panels(), ceil_div(kWorkOfTask, of_panel + 1),
                                           ceil_div(call.out_features, kFeatures), ceil_div(kWorkOfTask, of_block + 1));
        if (status != Status::ok) return status;
        if (out_of_memory) return Status::out_of_memory;
    }
    return Status::ok;
}
