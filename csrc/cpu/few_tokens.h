// Few tokens: each weight is read from memory once, and multiplied with up to two tokens while it is in a register.
// Included inside a file's own namespace, after row_sums.h or row_sums_bf16.h, which define RowSums.
//
// A chunk is eight rows of W. After the main loop each row has a vector of partial sums. Eight such vectors are reduced
// together to one vector with one row per lane, and the activation is then computed for eight rows at once.

constexpr int kChunkRows = 8;
constexpr int kGroupTokens = 2;

// The maximum number of masks in one pass over a row, limited by the registers for sums. Further masks take further
// passes, which read the row from L1.
constexpr int max_group_masks(int tokens) { return kMasksAtOnce / tokens; }

constexpr std::int64_t kPrefetchBytes = 4096;  // how far ahead of use W is prefetched into L2

// Gates and values before the reduction over lanes, [token][row of the chunk][vector of masks].
struct Lanes {
    static constexpr int kVecs = vecs_for(max_group_masks(1));
    alignas(64) float gates[kGroupTokens][kChunkRows][kVecs][Vec::width];
    alignas(64) float values[kGroupTokens][kChunkRows][kVecs][Vec::width];
};

// The input of a kernel: eight rows whose number of columns is a multiple of 8 * kOctetsAtOnce.
template <class E, class W>
struct Rows {
    const W* weights[kChunkRows];
    const std::uint8_t* bits[kChunkRows];  // bytes of the first mask of this pass
    std::int64_t n_masks;                  // of the call; also the distance in bytes from octet to octet in `bits`
    const Operand<E>* x;
    std::int64_t x_stride;
    std::int64_t octets;
};

template <class E, class W, int Tokens, int Masks>
void add_products(const Rows<E, W>& in, int row, bool first, Lanes& lanes) {
    RowSums<E, W, Tokens, Masks> sums;
    sums.weights = in.weights[row];
    sums.bits = in.bits[row];
    for (int t = 0; t < Tokens; ++t) sums.x[t] = in.x + t * in.x_stride;
    sums.n_masks = in.n_masks;
    sums.clear();
    for (std::int64_t octet = 0; octet < in.octets; octet += kOctetsAtOnce<E>) {
        // Prefetch W by cache lines. Rows usually follow one another in memory, but the hardware's prefetcher stops at
        // the end of a page.
        for (std::size_t byte = 0; byte < 8 * kOctetsAtOnce<E> * sizeof(W); byte += 64) {
            __builtin_prefetch(reinterpret_cast<const char*>(sums.weights + 8 * octet) + kPrefetchBytes + byte, 0, 2);
        }
        __builtin_prefetch(sums.bits + octet * in.n_masks + kPrefetchBytes / 8, 0, 2);
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

template <class E, class W, int Tokens, int Masks>
void add_chunk(const Rows<E, W>& in, bool first, Lanes& lanes) {
    for (int row = 0; row < kChunkRows; ++row) add_products<E, W, Tokens, Masks>(in, row, first, lanes);
}

template <class E, class W>
using AddChunk = void (*)(const Rows<E, W>&, bool first, Lanes&);

// Returns the kernel for 1 to max_group_masks(Tokens) masks.
template <class E, class W, int Tokens, int... Masks>
AddChunk<E, W> find_kernel(int masks, std::integer_sequence<int, Masks...>) {
    static constexpr AddChunk<E, W> kKernels[] = {add_chunk<E, W, Tokens, Masks + 1>...};
    return kKernels[masks - 1];
}

template <class E, class W>
AddChunk<E, W> find_kernel(int tokens, int masks) {
    return tokens == 1 ? find_kernel<E, W, 1>(masks, std::make_integer_sequence<int, max_group_masks(1)>())
                       : find_kernel<E, W, 2>(masks, std::make_integer_sequence<int, max_group_masks(2)>());
}

// Reduces eight vectors, one per row. A vector with eight lanes holds one mask, and lane r of the result is the sum of
// row r. A vector with 16 lanes holds two masks, and lanes 2r and 2r + 1 of the result are the two sums of row r.
template <class Row>
MGLU_INLINE Vec sums_over_lanes(Row row) {
    const Vec a = pair_sums(row(0), row(1)), b = pair_sums(row(2), row(3));
    const Vec c = pair_sums(row(4), row(5)), d = pair_sums(row(6), row(7));
    return pair_sums(pair_sums(a, b), pair_sums(c, d));
}

template <class E, class W>
struct FewTokens {
    // With 8-bit weights, both 16-bit types of x share the code for bfloat16.
    using Sums = std::conditional_t<std::is_same_v<E, W> || std::is_same_v<E, float>, E, BFloat16>;

    const Forward& call;
    const Operand<E>* x;  // [tokens, in_features padded to whole steps], 0 past in_features
    std::int64_t x_stride;
    Activate activate;
    const float* term_weights;  // [tokens, kMaxMasks]

    void run(std::int64_t begin, std::int64_t end) const {
        for (std::int64_t chunk = begin; chunk < end; ++chunk) {
            for (std::int64_t token = 0; token < call.tokens; token += kGroupTokens) {
                run_chunk(chunk * kChunkRows, token, static_cast<int>(smaller(kGroupTokens, call.tokens - token)));
            }
        }
    }

    void run_chunk(std::int64_t first_row, std::int64_t first_token, int tokens) const {
        constexpr std::int64_t kStep = 8 * kOctetsAtOnce<E>;
        const auto rows = static_cast<int>(smaller(kChunkRows, call.out_features - first_row));
        const std::int64_t whole = call.in_features / kStep * kStep, rest = call.in_features - whole;
        Vec results[kGroupTokens] = {broadcast(0.0f), broadcast(0.0f)};
        Lanes lanes;
        Rows<Sums, W> body{}, tail{};
        W last_weights[kChunkRows][kStep] = {};
        std::uint8_t last_bits[kChunkRows][kOctetsAtOnce<E> * kMaxMasks] = {};
        const std::uint8_t* bits[kChunkRows];
        for (int r = 0; r < kChunkRows; ++r) {  // rows past the end repeat the last row; their results are dropped
            const std::int64_t row = first_row + smaller(r, rows - 1);
            body.weights[r] = static_cast<const W*>(call.weight) + row * call.weight_stride;
            bits[r] = call.packed_masks + row * call.mask_stride;
            for (std::int64_t k = 0; k < rest; ++k) last_weights[r][k] = body.weights[r][whole + k];
            const std::int64_t bytes = packed_octets(rest) * call.n_masks;
            for (std::int64_t i = 0; i < bytes; ++i) last_bits[r][i] = bits[r][mask_bytes(whole, call.n_masks) + i];
            tail.weights[r] = last_weights[r];
        }
        body.n_masks = tail.n_masks = call.n_masks;
        body.x_stride = tail.x_stride = x_stride;
        body.x = x + first_token * x_stride;
        tail.x = body.x + whole;
        body.octets = whole / kOctet;
        tail.octets = kOctetsAtOnce<E>;
        const int groups = static_cast<int>(ceil_div(call.n_masks, max_group_masks(tokens)));
        int first_mask = 0;
        for (int group = 0; group < groups; ++group) {
            const int left = static_cast<int>(call.n_masks) - first_mask;
            // All groups but the last fill whole vectors. So the order in which terms are summed does not depend on
            // how many groups there are, which depends on the number of tokens.
            const int vecs = vecs_for((left + groups - group - 1) / (groups - group));
            const int masks = static_cast<int>(smaller(vecs * kMasksPerVec, left));
            for (int r = 0; r < kChunkRows; ++r) {
                body.bits[r] = bits[r] + first_mask;
                tail.bits[r] = last_bits[r] + first_mask;
            }
            const AddChunk<Sums, W> add = find_kernel<Sums, W>(tokens, masks);
            add(body, true, lanes);
            if (rest) add(tail, false, lanes);
            for (int t = 0; t < tokens; ++t) {
                const float* mask_weight = term_weights + (first_token + t) * kMaxMasks + first_mask;
                results[t] =
                    add_terms(results[t], lanes, t, {first_token + t, first_row, first_mask, 0}, masks, mask_weight);
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

    Vec add_terms(Vec sum, const Lanes& lanes, int token, const MaskedSum& first, int masks,
                  const float* group_weights) const {
        for (int v = 0; v < vecs_for(masks); ++v) {
            float weights[kMasksPerVec];
            for (int i = 0; i < kMasksPerVec; ++i) {
                const int mask = v * kMasksPerVec + i;
                weights[i] = mask < masks ? group_weights[mask] : 0.0f;
            }
            Vec gate = sums_over_lanes([&](int r) MGLU_STEP { return load(lanes.gates[token][r][v]); });
            Vec value = sums_over_lanes([&](int r) MGLU_STEP { return load(lanes.values[token][r][v]); });
            mend_small_rests<E, W>(call, gate, value, [&](int lane) {
                const std::int64_t row = first.row + lane / kMasksPerVec, i = v * kMasksPerVec + lane % kMasksPerVec;
                return MaskedSum{row < call.out_features && i < masks ? first.token : -1, row, first.mask + i, 0};
            });
            if (call.weight_scale) {
                float scales[Vec::width];
                for (int lane = 0; lane < Vec::width; ++lane) {
                    scales[lane] = kFactor<W> * row_scale(call, first.row + lane / kMasksPerVec);
                }
                gate = gate * load(scales);
                value = value * load(scales);
            }
            sum = sum + activate(gate) * broadcast_each(weights) * value;
        }
        return sum;
    }
};

// Runs a Job, FewTokens or Linear, on chunks of W. Its x is a converted copy, in rows padded to a multiple of `step`.
template <class E, class Job, class... More>
Status run_chunks(const Forward& call, ParallelFor parallel_for, std::int64_t step, More... more) {
    const std::int64_t padded = ceil_div(call.in_features, step) * step;
    const Floats memory = allocate_floats(call.tokens * padded);
    if (!memory) return Status::out_of_memory;
    auto* x = reinterpret_cast<Operand<E>*>(memory.get());
    for (std::int64_t token = 0; token < call.tokens; ++token) {
        write_operands(static_cast<const E*>(call.x) + token * call.x_stride, call.in_features, padded,
                       x + token * padded);
    }
    const Job job{call, x, padded, more...};
    const std::int64_t chunks = ceil_div(call.out_features, kChunkRows);
    const std::int64_t work = call.in_features * (1 + call.n_masks) * call.tokens * kChunkRows;
    return over_ranges(parallel_for, chunks, ceil_div(kProductsPerTask, work + 1),
                       [&](std::int64_t begin, std::int64_t end) { job.run(begin, end); });
}

// Runs a Job for the type of the weight, which is dense or, if kReadsBytes, int8_row or fp8_row.
template <class E, template <class, class> class Job, class... More>
Status over_chunks(const Forward& call, ParallelFor parallel_for, std::int64_t step, More... more) {
    if constexpr (kReadsBytes) {
        if (call.weight_format == WeightFormat::int8_row)
            return run_chunks<E, Job<E, Int8>>(call, parallel_for, step, more...);
        if (call.weight_format == WeightFormat::fp8_row)
            return run_chunks<E, Job<E, Fp8>>(call, parallel_for, step, more...);
    }
    return run_chunks<E, Job<E, E>>(call, parallel_for, step, more...);
}

template <class E>
Status forward_few(const Forward& call, ParallelFor parallel_for, const float* term_weights) {
    return over_chunks<E, FewTokens>(call, parallel_for, 8 * kOctetsAtOnce<E>, activation_of(call.activation),
                                     term_weights);
}
