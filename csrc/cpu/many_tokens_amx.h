// Many tokens in bfloat16 by AMX: many_tokens.h with tiles for registers. Included inside a file's own namespace, after
// vec_avx512.h and mask_words.h.
//
// `tdpbf16ps` adds to 16 x 16 sums the products of a tile of 16 rows and a tile of 16 columns, 32 deep. Rows are
// features: a tile of W is 16 rows as they are in memory, masked or not. Columns are tokens: a tile of x is transposed,
// in pairs of in_features, once a call. Four tiles hold sums and two hold each operand, which is all eight: 32 features
// by 32 tokens.
//
// Masked tiles of W exist only in L2, for one k-block at a time; sums stay there for all k-blocks. Which products are
// summed in which order depends on in_features alone. Subnormal numbers count as 0.

constexpr std::int64_t kTile = 256;  // floats, or pairs of bfloat16: 1 KB
constexpr std::int64_t kLine = 16;   // padding: tiles a power of two apart would compete for few sets of L1
constexpr std::int64_t kSpacedTile = kTile + kLine;
constexpr std::int64_t kGroupFeatures = 32;           // features of two tiles
constexpr std::int64_t kDeep = 32;                    // in_features of a tile
constexpr std::int64_t kStepOctets = kDeep / kOctet;  // mask bytes of a row of a tile, for each mask
constexpr std::int64_t kMaxBlockSteps = 16;           // tiles of a k-block; 8 with only one panel of tokens
constexpr std::int64_t kMinBlockFeatures = 256;       // features x products of a block; with fewer, x is in L3
constexpr std::int64_t kMaxSums = 192 * 1024;         // floats of a block's sums, 768 KB
constexpr std::int64_t kMaxPanelsInL2 = 8;            // panels of x: up to these, the smallest block is best

// The permutations that transpose 16 x 16 numbers of 32 bits. In step `size`, squares of that size on both sides of the
// diagonal are swapped.
struct Swaps {
    alignas(64) std::int32_t low[4][16], high[4][16];
    constexpr Swaps() : low(), high() {
        for (int step = 0; step < 4; ++step) {
            for (int lane = 0; lane < 16; ++lane) {
                const int size = 1 << step, other = 16 + (lane ^ size);
                low[step][lane] = lane & size ? other : lane;
                high[step][lane] = lane & size ? 16 + lane : lane ^ size;
            }
        }
    }
};
static constexpr Swaps kSwaps;

MGLU_INLINE void transpose(__m512i (&rows)[16]) {
    unrolled<4>([&](auto step) MGLU_STEP {
        constexpr int size = 1 << step;
        const __m512i low = _mm512_loadu_si512(kSwaps.low[step]), high = _mm512_loadu_si512(kSwaps.high[step]);
        unrolled<8>([&](auto i) MGLU_STEP {
            constexpr int first = i / size * 2 * size + i % size;
            const __m512i a = rows[first], b = rows[first + size];
            rows[first] = _mm512_permutex2var_epi32(a, low, b);
            rows[first + size] = _mm512_permutex2var_epi32(a, high, b);
        });
    });
}

// Rounds the results of two features and 16 tokens to pairs of bfloat16.
MGLU_INLINE __m512i round_pairs(Vec even, Vec odd) {
    const __m512i halves = bit_cast<__m512i>(_mm512_cvtne2ps_pbh(odd.v, even.v));
    const __m512i order =
        _mm512_setr_epi32(0x100000, 0x110001, 0x120002, 0x130003, 0x140004, 0x150005, 0x160006, 0x170007, 0x180008,
                          0x190009, 0x1a000a, 0x1b000b, 0x1c000c, 0x1d000d, 0x1e000e, 0x1f000f);
    return _mm512_permutexvar_epi16(order, halves);
}

// Configures all eight tiles as 16 rows of 64 bytes on this thread, for the lifetime of this object.
class Tiles {
  public:
    Tiles() {
        alignas(64) std::uint8_t config[64] = {1};  // palette 1; bytes of a row from byte 16 on, rows from byte 48 on
        for (int tile = 0; tile < 8; ++tile) config[16 + 2 * tile] = 64, config[48 + tile] = 16;
        _tile_loadconfig(config);
    }
    ~Tiles() { _tile_release(); }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;
};

// sums [32 features][16 * Vecs tokens] = or += weights [steps][2 tiles] x [steps][Vecs tiles]; `first` chooses `=`.
template <int Vecs>
void multiply(const float* weights, std::int64_t steps, const float* x, float* sums, bool first) {
    constexpr std::int64_t kWidth = 16 * Vecs, kBytes = 4 * kWidth;
    asm volatile("" ::: "memory");  // GCC does not know that its tile loads read memory
    _tile_zero(0);
    _tile_zero(1);
    if (Vecs == 2) _tile_zero(2);
    if (Vecs == 2) _tile_zero(3);
    if (!first) {
        _tile_loadd(0, sums, kBytes);
        _tile_loadd(1, sums + 16 * kWidth, kBytes);
        if (Vecs == 2) _tile_loadd(2, sums + 16, kBytes);
        if (Vecs == 2) _tile_loadd(3, sums + 16 * kWidth + 16, kBytes);
    }
    for (std::int64_t step = 0; step < steps; ++step, weights += 2 * kSpacedTile, x += Vecs * kTile) {
        _tile_loadd(6, x, 64);
        _tile_loadd(4, weights, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, weights + kSpacedTile, 64);
        _tile_dpbf16ps(1, 5, 6);
        if (Vecs == 2) {
            _tile_loadd(7, x + kTile, 64);
            _tile_dpbf16ps(2, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, kBytes);
    _tile_stored(1, sums + 16 * kWidth, kBytes);
    if (Vecs == 2) _tile_stored(2, sums + 16, kBytes);
    if (Vecs == 2) _tile_stored(3, sums + 16 * kWidth + 16, kBytes);
}

struct TileProducts {
    const Forward& call;
    Activate activate;
    const float* routes;  // [tokens, kMaxMasks]
    std::int64_t vecs;    // vectors of a panel, which has 16 * vecs tokens
    std::int64_t panels;  // panels of all tokens
    std::int64_t panels_per_block;
    std::int64_t groups_per_block;  // groups of 32 features
    std::int64_t steps;             // steps of 32 in_features
    std::int64_t steps_per_k_block;
    float* x;  // tiles [panel][step][vec], pairs of bfloat16
    bool* out_of_memory;

    std::int64_t width() const { return 16 * vecs; }
    std::int64_t products() const { return call.n_masks + 1; }
    // The size of one product's tiles of W for a group and k-block.
    std::int64_t group_size() const { return steps_per_k_block * 2 * kSpacedTile + kLine; }
    std::int64_t features_per_block() const { return kGroupFeatures * groups_per_block; }
    std::int64_t feature_blocks() const { return ceil_div(call.out_features, features_per_block()); }
    std::int64_t blocks() const { return ceil_div(panels, panels_per_block) * feature_blocks(); }

    // Transposes a panel of x, with zeros for tokens past the end and for in_features past theirs.
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

    struct Block {
        float* weights;  // [product][group][step][2 tiles, kSpacedTile apart]
        float* sums;     // [product][group][panel][feature of 32][token]
        std::int64_t first_feature, first_panel, panels;
    };

    void run(WorkQueue& queue) const {
        const std::int64_t weights = products() * groups_per_block * group_size();
        const std::int64_t sums = products() * groups_per_block * panels_per_block * kGroupFeatures * width();
        const Floats scratch = allocate_floats(weights + sums);
        if (!scratch) {
            __atomic_store_n(out_of_memory, true, __ATOMIC_RELAXED);
            return;
        }
        const Tiles tiles;
        queue.for_each([&](std::int64_t i) {  // all features of one block of tokens, then of the next: x stays in L2
            const std::int64_t panel = i / feature_blocks() * panels_per_block;
            const Block block{scratch.get(), scratch.get() + weights, i % feature_blocks() * features_per_block(),
                              panel, smaller(panels_per_block, panels - panel)};
            run_block(block);
        });
    }

    void run_block(const Block& block) const {
        const std::int64_t features = smaller(features_per_block(), call.out_features - block.first_feature);
        const std::int64_t groups = ceil_div(features, kGroupFeatures);
        std::int64_t step = 0;
        do {  // runs once if in_features is 0, to set sums to 0
            const std::int64_t k_block = smaller(steps_per_k_block, steps - step);
            for (std::int64_t f = 0; f < features; ++f) mask_weights(block, f, step, k_block);
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

    // Writes a k-block of one row, as feature f of the block: whole, and under each mask. Rows past the last feature
    // keep what was there; nobody reads their sums.
    void mask_weights(const Block& block, std::int64_t f, std::int64_t step, std::int64_t k_block) const {
        const std::int64_t n = call.n_masks, row = block.first_feature + f, group = f / kGroupFeatures;
        const std::int64_t end = step + k_block, whole = smaller(end, call.in_features / kDeep);
        const auto* weights = static_cast<const BFloat16*>(call.weight) + row * call.weight_stride;
        const std::uint8_t* bits = call.packed_masks + row * call.mask_stride;
        float* to = weights_at(block, 0, group) + f % kGroupFeatures / 16 * kSpacedTile + f % 16 * 16;
        const __m512i order = byte_order(n);
        const __mmask64 all = first_bytes(kStepOctets * n);
        for (std::int64_t s = step; s < whole; ++s, to += 2 * kSpacedTile) {
            // Prefetch what the next k-block reads: the hardware's prefetcher does not follow 32 rows.
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
            alignas(64) float route_lanes[kMaxMasks][16] = {};
            for (std::int64_t i = 0; i < call.n_masks; ++i) {
                for (std::int64_t t = 0; t < tokens; ++t) route_lanes[i][t] = routes[(token + t) * kMaxMasks + i];
            }
            __m512i rows[16];
            for (int pair = 0; pair < 16; ++pair) {
                Vec results[2];
                for (int odd = 0; odd < 2; ++odd) {
                    const std::int64_t at = (2 * pair + odd) * width() + vec * 16;
                    const MaskedSum first{token, feature + 2 * pair + odd, 0, 0};
                    results[odd] = sum_of_terms(block, group, panel, at, first, route_lanes);
                }
                rows[pair] = round_pairs(results[0], results[1]);
            }
            transpose(rows);
            auto* out = static_cast<BFloat16*>(call.out) + token * call.out_stride + feature;
            for (std::int64_t t = 0; t < tokens; ++t) {
                _mm512_mask_storeu_epi16(out + t * call.out_stride, valid, rows[t]);
            }
        }
    }

    // `first` is the sum of the first lane and mask. The lanes at `at` are the tokens that follow.
    Vec sum_of_terms(const Block& block, std::int64_t group, std::int64_t panel, std::int64_t at,
                     const MaskedSum& first, const float (*route_lanes)[16]) const {
        const Vec total = load(sums_at(block, 0, group, panel) + at);
        Vec sum = broadcast(0.0f);
        for (std::int64_t i = 0; i < call.n_masks; ++i) {
            Vec gate = load(sums_at(block, 1 + i, group, panel) + at), value = total - gate;
            mend_small_rests<BFloat16>(call, gate, value, [&](int lane) {
                const std::int64_t token = first.token + lane;
                return MaskedSum{token < call.tokens && first.row < call.out_features ? token : -1, first.row, i, 0};
            });
            sum = sum + activate(gate) * load(route_lanes[i]) * value;
        }
        return sum;
    }
};

inline Status forward_tiles(const Forward& call, ParallelFor parallel_for) {
    const std::int64_t vecs = call.tokens <= 16 ? 1 : 2, panels = ceil_div(call.tokens, 16 * vecs);
    const std::int64_t steps = ceil_div(call.in_features, kDeep), rows = kGroupFeatures * (call.n_masks + 1);
    const std::int64_t groups = panels > kMaxPanelsInL2 ? ceil_div(kMinBlockFeatures, rows) : 1;
    const std::int64_t fitting = smaller(panels, kMaxSums / (rows * groups * 16 * vecs));
    const std::int64_t panels_per_block = ceil_div(panels, ceil_div(panels, fitting));
    const std::int64_t k_block = panels == 1 ? kMaxBlockSteps / 2 : kMaxBlockSteps;
    const Floats routes = load_route_weights(call), x = allocate_floats(panels * steps * vecs * kTile);
    if (!routes || !x) return Status::out_of_memory;
    bool out_of_memory = false;
    const TileProducts job{call,          activation_of(call.activation),
                           routes.get(),  vecs,
                           panels,        panels_per_block,
                           groups,        steps,
                           k_block,       x.get(),
                           &out_of_memory};
    const std::int64_t panel_products = call.in_features * 16 * vecs;
    const std::int64_t block_products =
        job.features_per_block() * call.in_features * (call.n_masks + 1) * panels_per_block * 16;
    const Status status = pack_and_run(parallel_for, job, panels, ceil_div(kProductsPerTask / 16, panel_products + 1),
                                       job.blocks(), ceil_div(kProductsPerTask, block_products + 1));
    if (status != Status::ok) return status;
    return out_of_memory ? Status::out_of_memory : Status::ok;
}
