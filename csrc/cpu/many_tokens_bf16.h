// Many tokens in bfloat16: like many_tokens.h, but tiles are multiplied by instructions that take pairs of columns.
// Included inside a file's own namespace, after terms.h and either multiply_amx.h or multiply_dot.h.
//
// Masked tiles of W exist only in L2, and only for one k-block at a time. The sums stay in L2 until the last k-block.
// The order of summation depends only on in_features. Subnormal numbers count as 0.

#include "work_queue.h"

constexpr std::int64_t kMaxBlockSteps = 16;      // steps of 32 columns in a k-block; half as many if there is one panel
constexpr std::int64_t kMinBlockFeatures = 256;  // minimum of features * products in a block, so that x is reused in L2
constexpr std::int64_t kMaxSums = 192 * 1024;    // floats of a block's sums, 768 KB
constexpr std::int64_t kMaxPanelsInL2 = 8;       // for at most this many panels of x, blocks of 32 features are fastest

struct TileProducts {
    const Forward& call;
    Activate activate;
    Differentiate differentiate;
    const float* term_weights;  // [tokens, kMaxMasks]
    std::int64_t vecs;          // vectors of a panel, which has 16 * vecs tokens
    std::int64_t panels;        // panels of the call
    std::int64_t panels_per_block;
    std::int64_t groups_per_block;  // groups of 32 features
    std::int64_t steps;             // steps of 32 in_features
    std::int64_t steps_per_k_block;
    float* x;  // tiles [panel][step][vec], pairs of bfloat16

    std::int64_t width() const { return 16 * vecs; }
    std::int64_t products() const { return call.n_masks + 1; }
    // The floats that the tiles of W take for one product, group and k-block.
    std::int64_t group_size() const { return steps_per_k_block * 2 * kSpacedTile + kLine; }
    std::int64_t features_per_block() const { return kGroupFeatures * groups_per_block; }
    std::int64_t feature_blocks() const { return ceil_div(call.out_features, features_per_block()); }
    std::int64_t blocks() const { return ceil_div(panels, panels_per_block) * feature_blocks(); }

    // Transposes a panel of x, with zeros past the last token and the last column.
    void pack_x(std::int64_t panel) const {
        for (std::int64_t tile = panel * steps * vecs; tile < (panel + 1) * steps * vecs; ++tile) {
            const std::int64_t step = tile / vecs % steps, token = tile / vecs / steps * width() + tile % vecs * 16;
            const auto* from = static_cast<const BFloat16*>(call.x) + token * call.x_stride + step * kDeep;
            const __mmask32 valid = first_words(call.in_features - step * kDeep);
            __m512i rows[16];
            for (int t = 0; t < 16; ++t) {
                rows[t] = _mm512_maskz_loadu_epi16(token + t < call.tokens ? valid : 0, from + t * call.x_stride);
            }
            transpose(rows);
            for (int pair = 0; pair < 16; ++pair) _mm512_storeu_si512(x + tile * kTile + pair * 16, rows[pair]);
        }
    }

    static constexpr std::int64_t kGroupResults = kGroupFeatures * 16;

    struct Block {
        float* weights;  // [product][group][step][2 tiles, kSpacedTile apart]
        float* sums;     // [product][group][panel][feature of 32][token]
        float* results;  // [result][feature of 32][token of 16]
        std::int64_t first_feature, first_panel, panels;
    };

    bool run(WorkQueue& queue) const {
        const std::int64_t weights = products() * groups_per_block * group_size();
        const std::int64_t sums = products() * groups_per_block * panels_per_block * kGroupFeatures * width();
        const Floats scratch = allocate_floats(weights + sums + results_of(call) * kGroupResults);
        if (!scratch) return false;
        [[maybe_unused]] const Tiles tiles;
        queue.for_each([&](std::int64_t i) {  // consecutive tasks share a block of x, which stays in L2
            const std::int64_t panel = i / feature_blocks() * panels_per_block;
            const Block block{scratch.get(),
                              scratch.get() + weights,
                              scratch.get() + weights + sums,
                              i % feature_blocks() * features_per_block(),
                              panel,
                              smaller(panels_per_block, panels - panel)};
            run_block(block);
        });
        return true;
    }

    void run_block(const Block& block) const {
        const std::int64_t features = smaller(features_per_block(), call.out_features - block.first_feature);
        const std::int64_t groups = ceil_div(features, kGroupFeatures);
        std::int64_t step = 0;
        do {  // runs once if in_features is 0, to set sums to 0
            const std::int64_t k_block = smaller(steps_per_k_block, steps - step);
            for (std::int64_t f = 0; f < features; ++f) write_masked_weights(block, f, step, k_block);
            for (std::int64_t panel = 0; panel < block.panels; ++panel) {
                const float* x_panel = x + ((block.first_panel + panel) * steps + step) * vecs * kTile;
                for (std::int64_t product = 0; product < products(); ++product) {
                    for (std::int64_t group = 0; group < groups; ++group) {
                        const float* weights = weights_at(block, product, group);
                        float* sums = sums_at(block, product, group, panel);
                        if (vecs == 2) {
                            multiply<2>(weights, k_block, x_panel, sums, step == 0);
                        } else {
                            multiply<1>(weights, k_block, x_panel, sums, step == 0);
                        }
                    }
                }
            }
            step += k_block;
        } while (step < steps);
        for (std::int64_t panel = 0; panel < block.panels; ++panel) {
            for (std::int64_t group = 0; group < groups; ++group) write_outputs(block, group, panel);
        }
    }

    float* weights_at(const Block& block, std::int64_t product, std::int64_t group) const {
        return block.weights + (product * groups_per_block + group) * group_size();
    }

    float* sums_at(const Block& block, std::int64_t product, std::int64_t group, std::int64_t panel) const {
        const std::int64_t tile = (product * groups_per_block + group) * panels_per_block + panel;
        return block.sums + tile * kGroupFeatures * width();
    }

    // Writes a k-block of one row as feature f of the block, unmasked and under each mask. Rows past the last feature
    // are not written; their sums are never read.
    void write_masked_weights(const Block& block, std::int64_t f, std::int64_t step, std::int64_t k_block) const {
        const std::int64_t n = call.n_masks, row = block.first_feature + f, group = f / kGroupFeatures;
        const std::int64_t end = step + k_block, whole = smaller(end, call.in_features / kDeep);
        const auto* weights = static_cast<const BFloat16*>(call.weight) + row * call.weight_stride;
        const std::uint8_t* bits = call.packed_masks + row * call.mask_stride;
        float* to = weights_at(block, 0, group) + f % kGroupFeatures / 16 * kSpacedTile + f % 16 * 16;
        const __m512i order = byte_order(n);
        const __mmask64 all = first_bytes(kStepOctets * n);
        for (std::int64_t s = step; s < whole; ++s, to += 2 * kSpacedTile) {
            // Prefetch the next k-block. The hardware's prefetcher cannot follow 32 rows.
            __builtin_prefetch(weights + (s + steps_per_k_block) * kDeep, 0, 2);
            __builtin_prefetch(bits + (s + steps_per_k_block) * kStepOctets * n, 0, 2);
            mask_step(_mm512_loadu_si512(weights + s * kDeep), MaskWords(bits + s * kStepOctets * n, all, order), to);
        }
        if (whole < end) {
            const std::int64_t rest = call.in_features - whole * kDeep;
            const MaskWords masks(bits + whole * kStepOctets * n, first_bytes(packed_octets(rest) * n), order);
            mask_step(_mm512_maskz_loadu_epi16(first_words(rest), weights + whole * kDeep), masks, to);
        }
    }

    MGLU_INLINE void mask_step(__m512i weights, const MaskWords& masks, float* to) const {
        const std::int64_t product = groups_per_block * group_size(), n = call.n_masks;
        _mm512_storeu_si512(to, weights);
        for (std::int64_t i = 0; i < n; ++i) _mm512_storeu_si512(to += product, masks.apply(i, weights));
    }

    void write_outputs(const Block& block, std::int64_t group, std::int64_t panel) const {
        const std::int64_t feature = block.first_feature + group * kGroupFeatures;
        const __mmask32 valid = first_words(call.out_features - feature);
        for (std::int64_t vec = 0; vec < vecs; ++vec) {
            const std::int64_t token = (block.first_panel + panel) * width() + vec * 16;
            const std::int64_t tokens = smaller(16, call.tokens - token);
            alignas(64) float mask_weight_lanes[kMaxMasks][16] = {};
            for (std::int64_t i = 0; i < call.n_masks; ++i) {
                for (std::int64_t t = 0; t < tokens; ++t)
                    mask_weight_lanes[i][t] = term_weights[(token + t) * kMaxMasks + i];
            }
            for (std::int64_t f = 0; f < kGroupFeatures; ++f) {
                const std::int64_t at = f * width() + vec * 16;
                const Vec scale = broadcast(row_scale(call, feature + f));
                const auto terms = [&](std::int64_t i) MGLU_STEP {
                    const auto [gate, value] = gate_and_value(block, group, panel, at, {token, feature + f, i, 0});
                    return GateAndValue{gate * scale, value * scale};
                };
                const auto mask_weight = [&](std::int64_t i) MGLU_STEP { return load(mask_weight_lanes[i]); };
                sum_terms<BFloat16>(call, activate, differentiate, terms, mask_weight, block.results + f * 16,
                                    kGroupResults);
            }
            for (std::int64_t result = 0; result < results_of(call); ++result) {
                const float* from = block.results + result * kGroupResults;
                __m512i rows[16];
                for (int pair = 0; pair < 16; ++pair) {
                    rows[pair] = round_pairs(load(from + pair * 32), load(from + pair * 32 + 16));
                }
                transpose(rows);
                for (std::int64_t t = 0; t < tokens; ++t) {
                    auto* to = result_row<BFloat16>(call, result, token + t) + feature;
                    _mm512_mask_storeu_epi16(to, valid, rows[t]);
                }
            }
        }
    }

    // Returns the gates and values of 16 tokens. `at` is the vector's offset in the sums of a panel, and `first` holds
    // the token, row and mask of the first lane.
    GateAndValue gate_and_value(const Block& block, std::int64_t group, std::int64_t panel, std::int64_t at,
                                const MaskedSum& first) const {
        Vec gate = load(sums_at(block, 1 + first.mask, group, panel) + at);
        Vec value = load(sums_at(block, 0, group, panel) + at) - gate;
        mend_small_rests<BFloat16>(call, gate, value, [&](int lane) {
            const std::int64_t token = first.token + lane;
            const bool is_needed = token < call.tokens && first.row < call.out_features;
            return MaskedSum{is_needed ? token : -1, first.row, first.mask, 0};
        });
        return {gate, value};
    }
};

inline Status forward_tiles(const Forward& call, ParallelFor parallel_for) {
    const std::int64_t vecs = call.tokens <= 16 ? 1 : 2, panels = ceil_div(call.tokens, 16 * vecs);
    const std::int64_t steps = ceil_div(call.in_features, kDeep), rows = kGroupFeatures * (call.n_masks + 1);
    const std::int64_t groups = panels > kMaxPanelsInL2 ? ceil_div(kMinBlockFeatures, rows) : 1;
    const std::int64_t fitting = smaller(panels, kMaxSums / (rows * groups * 16 * vecs));
    const std::int64_t panels_per_block = ceil_div(panels, ceil_div(panels, fitting));
    const std::int64_t k_block = panels == 1 ? kMaxBlockSteps / 2 : kMaxBlockSteps;
    const Floats term_weights = load_mask_weights(call), x = allocate_floats(panels * steps * vecs * kTile);
    if (!term_weights || !x) return Status::out_of_memory;
    const TileProducts job{call,
                           activation_of(call.activation),
                           derivative_of(call.activation),
                           term_weights.get(),
                           vecs,
                           panels,
                           panels_per_block,
                           groups,
                           steps,
                           k_block,
                           x.get()};
    const std::int64_t panel_products = call.in_features * 16 * vecs;
    const std::int64_t block_products =
        job.features_per_block() * call.in_features * (call.n_masks + 1) * panels_per_block * 16;
    return pack_and_run(parallel_for, job, panels, ceil_div(kProductsPerTask / 16, panel_products + 1), job.blocks(),
                        ceil_div(kProductsPerTask, block_products + 1));
}
