// Many tokens in bfloat16 by AMX: as many_tokens.h, with tiles for registers. Included inside a file's own namespace,
// below vec_avx512.h and mask_words.h.
//
// `tdpbf16ps` adds to 16 x 16 sums the products of a tile of 16 rows with one of 16 columns, 32 deep. Rows are features:
// a tile of W is 16 rows as they lie, under a mask or not. Columns are tokens: a tile of x is transposed, in pairs of
// in_features, once a call. Four tiles of sums and two of either operand are all there are: 32 features by 32 tokens.
//
// Tiles of W exist only in L2, those of a stretch of in_features at a time; sums stay there over all stretches. Which
// products are summed in which order depends on in_features alone. Subnormal numbers count as 0.

constexpr std::int64_t kTile = 256;                    // floats, or pairs of bfloat16: 1 KB
constexpr std::int64_t kLine = 16;                     // tiles a power of two apart would share few sets of L1
constexpr std::int64_t kSpacedTile = kTile + kLine;
constexpr std::int64_t kRowsOfPair = 32;               // features of two tiles
constexpr std::int64_t kDeep = 32;                     // in_features of a tile
constexpr std::int64_t kStepsOfStretch = 16;           // tiles of a stretch, 8 where there is but one panel of tokens
constexpr std::int64_t kRowsOfBlock = 256;             // features times products: with fewer, x comes from L3 too often
constexpr std::int64_t kMaxSums = 192 * 1024;          // floats of a block, 768 KB
constexpr std::int64_t kPanelsOfL2 = 8;                // of x: up to these, the fewest rows do

// 16 x 16 numbers of 32 bits: in step `size`, squares of that size on both sides of the diagonal change places.
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

// Of two features and 16 tokens: pairs of bfloat16.
MGLU_INLINE __m512i round_pairs(Vec even, Vec odd) {
    const __m512i halves = bit_cast<__m512i>(_mm512_cvtne2ps_pbh(odd.v, even.v));
    const __m512i order = _mm512_setr_epi32(0x100000, 0x110001, 0x120002, 0x130003, 0x140004, 0x150005, 0x160006,
                                            0x170007, 0x180008, 0x190009, 0x1a000a, 0x1b000b, 0x1c000c, 0x1d000d,
                                            0x1e000e, 0x1f000f);
    return _mm512_permutexvar_epi16(order, halves);
}

// All eight tiles of 16 rows of 64 bytes, on this thread, for as long as this lives.
class Tiles {
public:
    Tiles() {
        alignas(64) std::uint8_t config[64] = {1};  // the palette; then from byte 16 on bytes a row, from 48 on rows
        for (int tile = 0; tile < 8; ++tile) config[16 + 2 * tile] = 64, config[48 + tile] = 16;
        _tile_loadconfig(config);
    }
    ~Tiles() { _tile_release(); }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;
};

// sums [32 features][16 * Vecs tokens] (+)= weights [steps][2 tiles] x [steps][Vecs tiles].
template <int Vecs>
void multiply(const float* weights, std::int64_t steps, const float* x, float* sums, bool first) {
    constexpr std::int64_t kWidth = 16 * Vecs, kBytes = 4 * kWidth;
    asm volatile("" ::: "memory");  // GCC's tile loads do not say that they read memory
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
    const float* routes;           // [tokens, kMaxMasks]
    std::int64_t vecs;             // of a panel: its tokens are 16 * vecs
    std::int64_t panels;           // of all tokens
    std::int64_t panels_of_block;
    std::int64_t groups_of_block;  // of 32 features
    std::int64_t steps;            // of 32 in_features
    std::int64_t steps_of_stretch;
    float* x;                      // tiles [panel][step][vec], pairs of bfloat16
    bool* out_of_memory;

    std::int64_t width() const { return 16 * vecs; }
    std::int64_t products() const { return call.n_masks + 1; }
    // Of the tiles of W of a product, over a stretch.
    std::int64_t group_size() const { return steps_of_stretch * 2 * kSpacedTile + kLine; }
    std::int64_t features_of_block() const { return kRowsOfPair * groups_of_block; }
    std::int64_t blocks_of_features() const { return ceil_div(call.out_features, features_of_block()); }
    std::int64_t blocks() const { return ceil_div(panels, panels_of_block) * blocks_of_features(); }

    // A panel of x; zeros stand for tokens past the end and for in_features past theirs.
    void pack(std::int64_t panel) const {
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

    void run(WorkQueue& turns) const {
        const std::int64_t weights = products() * groups_of_block * group_size();
        const std::int64_t sums = products() * groups_of_block * panels_of_block * kRowsOfPair * width();
        const Floats scratch = allocate_floats(weights + sums);
        if (!scratch) {
            __atomic_store_n(out_of_memory, true, __ATOMIC_RELAXED);
            return;
        }
        const Tiles tiles;
        turns.take([&](std::int64_t i) {  // all features of some tokens, then of others: x stays in L2
            const std::int64_t panel = i / blocks_of_features() * panels_of_block;
            const Block block{scratch.get(), scratch.get() + weights, i % blocks_of_features() * features_of_block(),
                              panel, smaller(panels_of_block, panels - panel)};
            run_block(block);
        });
    }

    void run_block(const Block& block) const {
        const std::int64_t features = smaller(features_of_block(), call.out_features - block.first_feature);
        const std::int64_t groups = ceil_div(features, kRowsOfPair);
        std::int64_t step = 0;
        do {  // once where there are no in_features, for sums of 0
            const std::int64_t stretch = smaller(steps_of_stretch, steps - step);
            for (std::int64_t f = 0; f < features; ++f) unpack(block, f, step, stretch);
            for (std::int64_t panel = 0; panel < block.panels; ++panel) {
                const float* panel_of_x = x + ((block.first_panel + panel) * steps + step) * vecs * kTile;
                for (std::int64_t product = 0; product < products(); ++product) {
                    for (std::int64_t group = 0; group < groups; ++group) {
                        const float* weights = weights_of(block, product, group);
                        float* sums = sums_of(block, product, group, panel);
                        if (vecs == 2) {
                            multiply<2>(weights, stretch, panel_of_x, sums, step == 0);
                        } else {
                            multiply<1>(weights, stretch, panel_of_x, sums, step == 0);
                        }
                    }
                }
            }
            step += stretch;
        } while (step < steps);
        for (std::int64_t panel = 0; panel < block.panels; ++panel) {
            for (std::int64_t group = 0; group < groups; ++group) finish(block, group, panel);
        }
    }

    float* weights_of(const Block& block, std::int64_t product, std::int64_t group) const {
        return block.weights + (product * groups_of_block + group) * group_size();
    }

    float* sums_of(const Block& block, std::int64_t product, std::int64_t group, std::int64_t panel) const {
        const std::int64_t tile = (product * groups_of_block + group) * panels_of_block + panel;
        return block.sums + tile * kRowsOfPair * width();
    }

    // A stretch of one row, as feature f of the block: whole, and under each mask. Rows past the last feature keep
    // what lies there, in sums that nobody reads.
    void unpack(const Block& block, std::int64_t f, std::int64_t step, std::int64_t stretch) const {
        const std::int64_t n = call.n_masks, row = block.first_feature + f, group = f / kRowsOfPair;
        const std::int64_t end = step + stretch, whole = smaller(end, call.in_features / kDeep);
        const auto* weights = static_cast<const BFloat16*>(call.weight) + row * call.weight_stride;
        const std::uint8_t* bits = call.packed_masks + row * call.mask_stride;
        float* to = weights_of(block, 0, group) + f % kRowsOfPair / 16 * kSpacedTile + f % 16 * 16;
        const __m512i order = byte_order(n);
        const __mmask64 all = first_bytes(4 * n);
        for (std::int64_t s = step; s < whole; ++s, to += 2 * kSpacedTile) {
            // What the next stretch reads: the hardware's prefetcher does not follow 32 rows.
            __builtin_prefetch(weights + (s + steps_of_stretch) * kDeep, 0, 2);
            __builtin_prefetch(bits + (s + steps_of_stretch) * 4 * n, 0, 2);
            unpack_step(_mm512_loadu_si512(weights + s * kDeep), MaskWords(bits + s * 4 * n, all, order), to);
        }
        if (whole < end) {
            const std::int64_t rest = call.in_features - whole * kDeep;
            const MaskWords masks(bits + whole * 4 * n, first_bytes(ceil_div(rest, 8) * n), order);
            unpack_step(_mm512_maskz_loadu_epi16(first_words(rest), weights + whole * kDeep), masks, to);
        }
    }

    MGLU_INLINE void unpack_step(__m512i weights, const MaskWords& masks, float* to) const {
        const std::int64_t product = groups_of_block * group_size(), n = call.n_masks;
        _mm512_storeu_si512(to, weights);
        for (std::int64_t i = 0; i < n; ++i) _mm512_storeu_si512(to += product, masks.apply(i, weights));
    }

    void finish(const Block& block, std::int64_t group, std::int64_t panel) const {
        const std::int64_t feature = block.first_feature + group * kRowsOfPair;
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
                    results[odd] = sum_of_terms(block, group, panel, at, route_lanes);
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

    Vec sum_of_terms(const Block& block, std::int64_t group, std::int64_t panel, std::int64_t at,
                     const float (*route_lanes)[16]) const {
        const Vec total = load(sums_of(block, 0, group, panel) + at);
        Vec sum = broadcast(0.0f);
        for (std::int64_t i = 0; i < call.n_masks; ++i) {
            const Vec part = load(sums_of(block, 1 + i, group, panel) + at), value = total - part;
            sum = sum + activate(poisoned(part, value)) * load(route_lanes[i]) * value;
        }
        return sum;
    }
};

inline Status forward_tiles(const Forward& call, ParallelFor parallel_for) {
    const std::int64_t vecs = call.tokens <= 16 ? 1 : 2, panels = ceil_div(call.tokens, 16 * vecs);
    const std::int64_t steps = ceil_div(call.in_features, kDeep), rows = kRowsOfPair * (call.n_masks + 1);
    const std::int64_t groups = panels > kPanelsOfL2 ? ceil_div(kRowsOfBlock, rows) : 1;
    const std::int64_t fitting = smaller(panels, kMaxSums / (rows * groups * 16 * vecs));
    const std::int64_t panels_of_block = ceil_div(panels, ceil_div(panels, fitting));
    const std::int64_t stretch = panels == 1 ? kStepsOfStretch / 2 : kStepsOfStretch;
    const Floats routes = all_routes(call), x = allocate_floats(panels * steps * vecs * kTile);
    if (!routes || !x) return Status::out_of_memory;
    bool out_of_memory = false;
    const TileProducts job{call, activation_of(call.activation), routes.get(), vecs, panels, panels_of_block, groups, steps,
                           stretch, x.get(), &out_of_memory};
    const std::int64_t of_panel = call.in_features * 16 * vecs;
    const std::int64_t of_block = job.features_of_block() * call.in_features * (call.n_masks + 1) * panels_of_block * 16;
    const Status status = pack_and_run(parallel_for, job, panels, ceil_div(kWorkOfTask / 16, of_panel + 1), job.blocks(),
                                       ceil_div(kWorkOfTask, of_block + 1));
    if (status != Status::ok) return status;
    return out_of_memory ? Status::out_of_memory : Status::ok;
}
