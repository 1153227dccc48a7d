// Few tokens: each weight is read from memory once, and multiplied where it lies in a register.
// Included inside a file's own namespace, below row_sums.h or row_dots.h, whose RowSums are those of one row.
//
// A chunk of eight rows shares the sums over lanes and the activation, a lane a row.

constexpr int kRowsOfChunk = 8;
constexpr int kTokensOfGroup = 2;

// Masks at once: as many as the registers hold sums for. The row comes from L1 for the next group.
constexpr int masks_of_group(int tokens) { return kMasksAtOnce / tokens; }

constexpr std::int64_t kFetchAhead = 4096;  // bytes, into L2

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
    const Operand<E>* x;
    std::int64_t x_stride;
    std::int64_t octets;
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
        // By lines of W. Rows mostly follow one another, and the hardware's prefetcher stops at a page's end.
        for (std::size_t byte = 0; byte < 8 * kOctetsAtOnce<E> * sizeof(E); byte += 64) {
            __builtin_prefetch(reinterpret_cast<const char*>(sums.weights + 8 * octet) + kFetchAhead + byte, 0, 2);
        }
        __builtin_prefetch(sums.bits + octet * in.n_masks + kFetchAhead / 8, 0, 2);
        sums.add(octet);
    }
    unrolled<Tokens * sums.kVecs>([&](auto i) MGLU_STEP {
        constexpr int t = i / sums.kVecs, v = i % sums.kVecs;
        const Vec gate = sums.template gate<t, v>(), value = sums.template value<t, v>();
        float *gates = lanes.gates[t][row][v], *values = lanes.values[t][row][v];
        store(gates, first ? gate : load(gates) + gate);
        store(values, first ? value : load(values) + value);
    });
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
    const Operand<E>* x;      // [tokens, in_features padded to whole steps], 0 past in_features
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
    const Floats memory = allocate_floats(call.tokens * padded);
    if (!memory) return Status::out_of_memory;
    auto* x = reinterpret_cast<Operand<E>*>(memory.get());
    for (std::int64_t token = 0; token < call.tokens; ++token) {
        write_operands(static_cast<const E*>(call.x) + token * call.x_stride, call.in_features, padded,
                       x + token * padded);
    }
    const FewTokens<E> job{call, activation_of(call.activation), x, padded, routes};
    const auto body = [](std::int64_t begin, std::int64_t end, void* context) {
        static_cast<const FewTokens<E>*>(context)->run(begin, end);
    };
    const std::int64_t chunks = ceil_div(call.out_features, kRowsOfChunk);
    const std::int64_t work = call.in_features * (1 + call.n_masks) * call.tokens * kRowsOfChunk;
    const std::int64_t grain = ceil_div(kWorkOfTask, work + 1);
    return parallel_for(0, chunks, grain, body, const_cast<FewTokens<E>*>(&job)) ? Status::parallel_for_failed
                                                                                  : Status::ok;
}
