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

// Octets of a step. In float32 those between two differences: with 4, errors reached 1.6 times the naive layer's.
template <class E>
constexpr int kOctetsAtOnce = std::is_same_v<E, float> ? 2 : 4;

constexpr std::int64_t kFetchAhead = 4096;  // bytes, into L2

constexpr int vecs_of(int masks) { return (masks + kMasksPerVec - 1) / kMasksPerVec; }

// Sums that take turns, octet by octet: enough in flight to hide the latency of an addition, few enough for the
// registers. Rows could take turns instead, and share x; but the hardware's prefetcher follows one stream better than
// four.
template <class E>
constexpr int chains_of(int masks, int tokens) {
    const int sums = tokens * (1 + vecs_of(masks));
    return kSumsValues<E> ? 1 : 4 * sums <= kSumRegisters ? 4 : 2 * sums <= kSumRegisters ? 2 : 1;
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
    const float* x;
    std::int64_t x_stride;
    std::int64_t octets;
};

// The sums of one row.
template <class E, int Tokens, int Masks>
struct RowSums {
    static constexpr int kVecs = vecs_of(Masks), kChains = chains_of<E>(Masks, Tokens), kOctets = kOctetsAtOnce<E>;
    static constexpr int kValues = kSumsValues<E> ? kVecs : 1;

    const E* weights;
    const std::uint8_t* bits;
    const float* x[Tokens];
    std::int64_t n_masks;
    Vec gates[kChains][Tokens][kVecs];     // or in 16 bits, parts
    Vec values[kChains][Tokens][kValues];  // or in 16 bits, the total

    MGLU_INLINE void clear() {
        for (int c = 0; c < kChains; ++c) {
            for (int t = 0; t < Tokens; ++t) {
                for (Vec& sum : gates[c][t]) sum = broadcast(0.0f);
                for (Vec& sum : values[c][t]) sum = broadcast(0.0f);
            }
        }
    }

    // Octet by octet: all sums stay in registers.
    MGLU_INLINE void add_to_parts(std::int64_t first) {
#pragma GCC unroll 4
        for (int o = 0; o < kOctets; ++o) {
            const int c = o % kChains;
            const Vec w = load_octet(weights + 8 * (first + o));
            const LongMasks<Masks> masks(bits + (first + o) * n_masks);
#pragma GCC unroll 2
            for (int t = 0; t < Tokens; ++t) {
                const Vec product = w * load_octet(x[t] + 8 * (first + o));
                values[c][t][0] = values[c][t][0] + product;
#pragma GCC unroll 8
                for (int v = 0; v < kVecs; ++v) gates[c][t][v] = masks.add(v, gates[c][t][v], product);
            }
        }
    }

    // Mask by mask: a part is summed over the octets alone, in the order of the total: all ones leave exactly 0.
    MGLU_INLINE void add_to_values(std::int64_t first) {
#pragma GCC unroll 2
        for (int t = 0; t < Tokens; ++t) {
            Vec products[kOctets], total = broadcast(0.0f);
#pragma GCC unroll 4
            for (int o = 0; o < kOctets; ++o) {
                products[o] = load_octet(weights + 8 * (first + o)) * load_octet(x[t] + 8 * (first + o));
                total = o == 0 ? products[o] : total + products[o];
            }
#pragma GCC unroll 8
            for (int v = 0; v < kVecs; ++v) {
                Vec part = broadcast(0.0f);
#pragma GCC unroll 4
                for (int o = 0; o < kOctets; ++o) {
                    part = ShortMasks<Masks>(bits + (first + o) * n_masks).add(v, part, products[o]);
                }
                gates[0][t][v] = gates[0][t][v] + part;
                values[0][t][v] = values[0][t][v] + (total - part);
            }
        }
    }

    Vec gate(int t, int v) const {
        Vec sum = gates[0][t][v];
        for (int c = 1; c < kChains; ++c) sum = sum + gates[c][t][v];
        return kSumsValues<E> ? sum : LongMasks<Masks>::sum_of(v, sum);
    }
    Vec value(int t, int v) const {
        if (kSumsValues<E>) return values[0][t][v % kValues];
        Vec total = values[0][t][0];
        for (int c = 1; c < kChains; ++c) total = total + values[c][t][0];
        return total - gate(t, v);
    }
};

template <class E, int Tokens, int Masks>
void add_products(const Rows<E>& in, int row, bool first, Lanes& lanes) {
    RowSums<E, Tokens, Masks> sums;
    sums.weights = in.weights[row];
    sums.bits = in.bits[row];
    for (int t = 0; t < Tokens; ++t) sums.x[t] = in.x + t * in.x_stride;
    sums.n_masks = in.n_masks;
    sums.clear();
    for (std::int64_t octet = 0; octet < in.octets; octet += kOctetsAtOnce<E>) {
        // A step is a line of W. Rows mostly follow one another, and the hardware's prefetcher stops at a page's end.
        __builtin_prefetch(reinterpret_cast<const char*>(sums.weights + 8 * octet) + kFetchAhead, 0, 2);
        __builtin_prefetch(sums.bits + octet * in.n_masks + kFetchAhead / 8, 0, 2);
        if constexpr (kSumsValues<E>) {
            sums.add_to_values(octet);
        } else {
            sums.add_to_parts(octet);
        }
    }
    for (int t = 0; t < Tokens; ++t) {
        for (int v = 0; v < sums.kVecs; ++v) {
            float* gate = lanes.gates[t][row][v];
            float* value = lanes.values[t][row][v];
            store(gate, first ? sums.gate(t, v) : load(gate) + sums.gate(t, v));
            store(value, first ? sums.value(t, v) : load(value) + sums.value(t, v));
        }
    }
}

template <class E, int Tokens, int Masks>
void add_chunk(const Rows<E>& in, bool first, Lanes& lanes) {
    for (int row = 0; row < kRowsOfChunk; ++row) add_products<E, Tokens, Masks>(in, row, first, lanes);
}

template <class E>
using AddChunk = void (*)(const Rows<E>&, bool first, Lanes&);

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

// The sum of the eight lanes of each row and mask: lane r of the result, or of two masks, lanes 2r and 2r + 1.
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
            const AddChunk<E> add = kernel_of<E>(tokens, masks);
            add(body, true, lanes);
            if (rest) add(tail, false, lanes);
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
