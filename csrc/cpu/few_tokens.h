// Few tokens: each weight is read from memory once, and multiplied where it lies in a register.
// Included inside a file's own namespace, below Vec and Mask.
//
// For a row r of W the lanes of one vector sum every eighth product, `total`; one vector a mask sums those of its bits,
// `part`. Gate and value are `part` and `total - part`. In 16-bit types that difference loses nothing that the type
// could hold. In float32 it would: a value of few weights is a small difference of large sums, and the error of `total`
// is in the values of all masks. There the difference is taken every two octets, and gate and value have sums of their
// own: at 4.5 instructions a mask and octet instead of 3, as exact as the naive layer's own products.
//
// A chunk of eight rows shares the sums over lanes and the activation, a lane a row.

constexpr int kRowsOfChunk = 8;
constexpr int kTokensOfGroup = 2;

// Masks at once: as many as the registers hold sums for. The row comes from L1 for the next group.
constexpr int masks_of_group(int tokens) { return kMasksAtOnce / tokens; }

template <class E>
constexpr bool kSumsValues = std::is_same_v<E, float>;

// Octets between two differences. Fewer are more exact: with 4, errors reached 1.6 times the naive layer's.
template <class E>
constexpr int kOctetsAtOnce = std::is_same_v<E, float> ? 2 : 4;
constexpr std::int64_t kStretch = 64;  // octets of a row that are fetched ahead at once: a multiple of kOctetsAtOnce

constexpr int vecs_of(int masks) { return (masks + kMasksPerVec - 1) / kMasksPerVec; }

// Rows at once: enough sums in flight to hide the latency of an addition, few enough for the registers.
template <class E>
constexpr int rows_at_once(int masks, int tokens) {
    const int sums = tokens * (kSumsValues<E> ? 2 * vecs_of(masks) : 1 + vecs_of(masks));
    return 4 * sums <= kSumRegisters ? 4 : 2 * sums <= kSumRegisters ? 2 : 1;
}

// Lanes of gates and values, [token][row of chunk][vector of masks].
struct Lanes {
    static constexpr int kVecs = vecs_of(masks_of_group(1));
    alignas(64) float gates[kTokensOfGroup][kRowsOfChunk][kVecs][Vec::width];
    alignas(64) float values[kTokensOfGroup][kRowsOfChunk][kVecs][Vec::width];
};

// What a kernel reads of a chunk: a multiple of kOctetsAtOnce octets.
template <class E>
struct Rows {
    const E* weights[kRowsOfChunk];
    const std::uint8_t* bits[kRowsOfChunk];  // of the first mask of the group
    std::int64_t n_masks;                    // bytes from octet to octet
    std::int64_t weight_stride, mask_stride; // from row to row
    const float* x;
    std::int64_t x_stride;
    std::int64_t octets;
};

// The same stretch of the row that follows `rows` further on, so that a row's start, where the hardware's prefetcher has
// yet to find its stream, is there in time. Past the end of the tensor a prefetch does nothing.
template <class E>
MGLU_INLINE void fetch_ahead(const Rows<E>& in, const E* weights, const std::uint8_t* bits, int rows) {
    const auto* weight = reinterpret_cast<const char*>(weights + rows * in.weight_stride);
    for (std::int64_t i = 0; i < 8 * kStretch * static_cast<std::int64_t>(sizeof(E)); i += 64) {
        __builtin_prefetch(weight + i, 0, 2);
    }
    for (std::int64_t i = 0; i < kStretch * in.n_masks; i += 64) __builtin_prefetch(bits + rows * in.mask_stride + i, 0, 2);
}

// The sums of `R` rows, and what feeds them.
template <class E, int Tokens, int Masks>
struct RowSums {
    static constexpr int R = rows_at_once<E>(Masks, Tokens), kVecs = vecs_of(Masks);
    static constexpr int kLast = Masks - (kVecs - 1) * kMasksPerVec;  // masks of the last vector

    const E* weights[R];
    const std::uint8_t* bits[R];
    const float* x[Tokens];
    std::int64_t n_masks;
    // Gates and values, or in 16 bits the parts, and the total in place of the first value.
    Vec gates[R][Tokens][kVecs];
    Vec values[R][Tokens][kSumsValues<E> ? kVecs : 1];

    MGLU_INLINE static Mask mask_of(const std::uint8_t* octet, int v) {
        const std::uint8_t* byte = octet + v * kMasksPerVec;
        return v + 1 < kVecs ? load_mask<kMasksPerVec>(byte, 0) : load_mask<kLast>(byte, 0);
    }

    MGLU_INLINE void add(std::int64_t first) {
        constexpr int Octets = kOctetsAtOnce<E>;
        Vec of_x[Octets][Tokens];
#pragma GCC unroll 4
        for (int o = 0; o < Octets; ++o) {
#pragma GCC unroll 2
            for (int t = 0; t < Tokens; ++t) of_x[o][t] = load_octet(x[t] + 8 * (first + o));
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            Vec products[Octets][Tokens];
            Vec total[Tokens];
#pragma GCC unroll 4
            for (int o = 0; o < Octets; ++o) {
                const Vec w = load_octet(weights[r] + 8 * (first + o));
#pragma GCC unroll 2
                for (int t = 0; t < Tokens; ++t) {
                    products[o][t] = w * of_x[o][t];
                    total[t] = o == 0 ? products[o][t] : total[t] + products[o][t];
                }
            }
            const std::uint8_t* octets = bits[r] + first * n_masks;
#pragma GCC unroll 8
            for (int v = 0; v < kVecs; ++v) {
                Vec part[Tokens];
#pragma GCC unroll 2
                for (int t = 0; t < Tokens; ++t) part[t] = kSumsValues<E> ? broadcast(0.0f) : gates[r][t][v];
#pragma GCC unroll 4
                for (int o = 0; o < Octets; ++o) {
                    const Mask mask = mask_of(octets + o * n_masks, v);
#pragma GCC unroll 2
                    for (int t = 0; t < Tokens; ++t) part[t] = add_masked(part[t], products[o][t], mask);
                }
#pragma GCC unroll 2
                for (int t = 0; t < Tokens; ++t) {
                    gates[r][t][v] = kSumsValues<E> ? gates[r][t][v] + part[t] : part[t];
                    if (kSumsValues<E>) values[r][t][v] = values[r][t][v] + (total[t] - part[t]);
                }
            }
#pragma GCC unroll 2
            for (int t = 0; t < Tokens; ++t) {
                if (!kSumsValues<E>) values[r][t][0] = values[r][t][0] + total[t];
            }
        }
    }
};

template <class E, int Tokens, int Masks>
void add_products(const Rows<E>& in, int row, Lanes& lanes) {
    using Sums = RowSums<E, Tokens, Masks>;
    constexpr int R = Sums::R;
    Sums sums;
    sums.n_masks = in.n_masks;
    for (int r = 0; r < R; ++r) {
        sums.weights[r] = in.weights[row + r];
        sums.bits[r] = in.bits[row + r];
    }
    for (int t = 0; t < Tokens; ++t) sums.x[t] = in.x + t * in.x_stride;
    for (auto& of_row : sums.gates) {
        for (auto& of_token : of_row) {
            for (Vec& sum : of_token) sum = broadcast(0.0f);
        }
    }
    for (auto& of_row : sums.values) {
        for (auto& of_token : of_row) {
            for (Vec& sum : of_token) sum = broadcast(0.0f);
        }
    }
    for (std::int64_t begin = 0; begin < in.octets; begin += kStretch) {
        const std::int64_t end = smaller(begin + kStretch, in.octets);
        for (int r = 0; r < R; ++r) {
            fetch_ahead(in, sums.weights[r] + 8 * begin, sums.bits[r] + begin * in.n_masks, R);
        }
        for (std::int64_t octet = begin; octet < end; octet += kOctetsAtOnce<E>) sums.add(octet);
    }
    for (int r = 0; r < R; ++r) {
        for (int t = 0; t < Tokens; ++t) {
            for (int v = 0; v < Sums::kVecs; ++v) {
                const Vec gate = sums.gates[r][t][v];
                const Vec value = kSumsValues<E> ? sums.values[r][t][v] : sums.values[r][t][0] - gate;
                float* gate_lanes = lanes.gates[t][row + r][v];
                float* value_lanes = lanes.values[t][row + r][v];
                store(gate_lanes, load(gate_lanes) + gate);
                store(value_lanes, load(value_lanes) + value);
            }
        }
    }
}

template <class E, int Tokens, int Masks>
void add_chunk(const Rows<E>& in, Lanes& lanes) {
    for (int row = 0; row < kRowsOfChunk; row += rows_at_once<E>(Masks, Tokens)) {
        add_products<E, Tokens, Masks>(in, row, lanes);
    }
}

template <class E>
using AddChunk = void (*)(const Rows<E>&, Lanes&);

// The kernel for a number of masks, 1 to masks_of_group(Tokens).
template <class E, int Tokens, int... Masks>
AddChunk<E> kernel_of(int masks, std::integer_sequence<int, Masks...>) {
    static constexpr AddChunk<E> kKernels[] = {add_chunk<E, Tokens, Masks + 1>...};
    return kKernels[masks - 1];
}

template <class E>
AddChunk<E> kernel_of(int tokens, int masks) {
    return tokens == 1 ? kernel_of<E, 1>(masks, std::make_integer_sequence<int, masks_of_group(1)>())
                       : kernel_of<E, 2>(masks, std::make_integer_sequence<int, masks_of_group(2)>());
}

// The sum of the eight lanes of each row and mask: lane r of the result, or where a vector holds two masks, 2r and 2r + 1.
MGLU_INLINE Vec sums_over_lanes(const float (*rows)[Lanes::kVecs][Vec::width], int v) {
    const Vec a = pair_sums(load(rows[0][v]), load(rows[1][v])), b = pair_sums(load(rows[2][v]), load(rows[3][v]));
    const Vec c = pair_sums(load(rows[4][v]), load(rows[5][v])), d = pair_sums(load(rows[6][v]), load(rows[7][v]));
    return pair_sums(pair_sums(a, b), pair_sums(c, d));
}

template <class E>
struct FewTokens {
    const Forward& call;
    Activate activate;
    const float* x;           // [tokens, in_features padded to whole steps], 0 past in_features
    std::int64_t x_stride;
    const float* routes;      // [tokens, kMaxMasks]

    void run(std::int64_t begin, std::int64_t end) const {
        for (std::int64_t chunk = begin; chunk < end; ++chunk) {
            for (std::int64_t token = 0; token < call.tokens; token += kTokensOfGroup) {
                run_chunk(chunk * kRowsOfChunk, token, static_cast<int>(smaller(kTokensOfGroup, call.tokens - token)));
            }
        }
    }

    void run_chunk(std::int64_t first_row, std::int64_t first_token, int tokens) const {
        constexpr std::int64_t kStep = 8 * kOctetsAtOnce<E>;
        const auto rows = static_cast<int>(smaller(kRowsOfChunk, call.out_features - first_row));
        const std::int64_t whole = call.in_features / kStep * kStep, rest = call.in_features - whole;
        Vec results[kTokensOfGroup] = {broadcast(0.0f), broadcast(0.0f)};
        Lanes lanes;
        Rows<E> body{}, tail{};
        E last_weights[kRowsOfChunk][kStep] = {};
        std::uint8_t last_bits[kRowsOfChunk][kOctetsAtOnce<E> * kMaxMasks] = {};
        const std::uint8_t* bits[kRowsOfChunk];
        for (int r = 0; r < kRowsOfChunk; ++r) {  // past the end, the last row again, whose result goes nowhere
            const std::int64_t row = first_row + smaller(r, rows - 1);
            body.weights[r] = static_cast<const E*>(call.weight) + row * call.weight_stride;
            bits[r] = call.packed_masks + row * call.mask_stride;
            for (std::int64_t k = 0; k < rest; ++k) last_weights[r][k] = body.weights[r][whole + k];
            const std::int64_t bytes = ceil_div(rest, 8) * call.n_masks;
            for (std::int64_t i = 0; i < bytes; ++i) last_bits[r][i] = bits[r][whole / 8 * call.n_masks + i];
            tail.weights[r] = last_weights[r];
        }
        body.n_masks = tail.n_masks = call.n_masks;
        body.weight_stride = call.weight_stride;
        body.mask_stride = call.mask_stride;
        body.x_stride = tail.x_stride = x_stride;
        body.x = x + first_token * x_stride;
        tail.x = body.x + whole;
        body.octets = whole / 8;
        tail.octets = kOctetsAtOnce<E>;
        const int groups = static_cast<int>(ceil_div(call.n_masks, masks_of_group(tokens)));
        int first_mask = 0;
        for (int group = 0; group < groups; ++group) {
            const int left = static_cast<int>(call.n_masks) - first_mask;
            // Whole vectors of masks in all groups but the last, so that a term's place in the sum is always the same.
            const int vecs = vecs_of((left + groups - group - 1) / (groups - group));
            const int masks = static_cast<int>(smaller(vecs * kMasksPerVec, left));
            for (int r = 0; r < kRowsOfChunk; ++r) {
                body.bits[r] = bits[r] + first_mask;
                tail.bits[r] = last_bits[r] + first_mask;
            }
            __builtin_memset(&lanes, 0, sizeof(lanes));
            const AddChunk<E> add = kernel_of<E>(tokens, masks);
            add(body, lanes);
            if (rest) add(tail, lanes);
            for (int t = 0; t < tokens; ++t) {
                const float* route = routes + (first_token + t) * kMaxMasks + first_mask;
                results[t] = add_terms(results[t], lanes, t, masks, route);
            }
            first_mask += masks;
        }
        for (int t = 0; t < tokens; ++t) {
            float result[Vec::width];
            store(result, sum_over_masks(results[t]));
            E* out = static_cast<E*>(call.out) + (first_token + t) * call.out_stride + first_row;
            for (int r = 0; r < rows; ++r) out[r] = from_float<E>(result[r]);
        }
    }

    Vec add_terms(Vec sum, const Lanes& lanes, int token, int masks, const float* routes_of_group) const {
        for (int v = 0; v < vecs_of(masks); ++v) {
            float weights[kMasksPerVec];
            for (int i = 0; i < kMasksPerVec; ++i) {
                const int mask = v * kMasksPerVec + i;
                weights[i] = mask < masks ? routes_of_group[mask] : 0.0f;
            }
            const Vec value = sums_over_lanes(lanes.values[token], v);
            const Vec gate = poisoned(sums_over_lanes(lanes.gates[token], v), value);
            sum = sum + activate(gate) * broadcast_each(weights) * value;
        }
        return sum;
    }
};

template <class E>
Status forward_few(const Forward& call, ParallelFor parallel_for, const float* routes) {
    const std::int64_t padded = ceil_div(call.in_features, 8 * kOctetsAtOnce<E>) * 8 * kOctetsAtOnce<E>;
    const Floats x = allocate_floats(call.tokens * padded);
    if (!x) return Status::out_of_memory;
    for (std::int64_t token = 0; token < call.tokens; ++token) {
        const E* from = static_cast<const E*>(call.x) + token * call.x_stride;
        float* to = x.get() + token * padded;
        std::int64_t k = 0;
        for (; k + 8 <= call.in_features; k += 8) store_octets(to + k, 0, 1, load_octet(from + k));
        for (; k < padded; ++k) to[k] = k < call.in_features ? to_float(from[k]) : 0.0f;
    }
    const FewTokens<E> job{call, activation_of(call.activation), x.get(), padded, routes};
    const auto body = [](std::int64_t begin, std::int64_t end, void* context) {
        static_cast<const FewTokens<E>*>(context)->run(begin, end);
    };
    const std::int64_t chunks = ceil_div(call.out_features, kRowsOfChunk);
    const std::int64_t work = call.in_features * (1 + call.n_masks) * call.tokens * kRowsOfChunk;
    const std::int64_t grain = ceil_div(kWorkOfTask, work + 1);
    return parallel_for(0, chunks, grain, body, const_cast<FewTokens<E>*>(&job)) ? Status::parallel_for_failed
                                                                                  : Status::ok;
}
