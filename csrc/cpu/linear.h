// A linear layer, out = x W^T in float32, for calls without masks. Included inside a file's own namespace, after
// few_tokens.h and one of the row_sums headers, which define load_weights and multiply_add.
//
// A few rows of W are multiplied with a few tokens while the weights are in registers. A chunk of eight rows is
// multiplied with a block of tokens while the chunk is in the caches.

constexpr int kLinearTokens = 4;  // tokens that share a load of a weight
template <int Tokens>             // rows that share a load of x; one token gains nothing from more than two rows
constexpr int kLinearRows = Tokens == 1 ? 2 : kSumRegisters / 8 * 2;
constexpr std::int64_t kLinearBlockBytes = 512 * 1024;  // bytes of x in a block of tokens, which stay in L2

// E is the type of x, and W is the type of the weights.
template <class E, class W>
struct Linear {
    using X = Operand<E>;

    const Forward& call;
    const X* x;  // [tokens, in_features padded to whole steps], 0 past in_features
    std::int64_t x_stride;

    // The rows of a chunk. Rows past the end of W repeat its last row; their results are dropped.
    struct Chunk {
        const W* weights[kChunkRows];
        alignas(64) W last[kChunkRows][kLinearStep];  // the columns past the last whole step, padded with zeros
    };

    void run(std::int64_t begin, std::int64_t end) const {
        const std::int64_t row_bytes = x_stride * static_cast<std::int64_t>(sizeof(X)) + 1;  // not 0, as a divisor
        const std::int64_t block = (kLinearBlockBytes / row_bytes / kLinearTokens + 1) * kLinearTokens;
        for (std::int64_t first = 0; first < call.tokens; first += block) {
            const std::int64_t stop = smaller(first + block, call.tokens);
            for (std::int64_t chunk = begin; chunk < end; ++chunk) run_chunk(chunk * kChunkRows, first, stop);
        }
    }

    void run_chunk(std::int64_t first_row, std::int64_t first_token, std::int64_t stop) const {
        const std::int64_t rows = smaller(kChunkRows, call.out_features - first_row);
        const std::int64_t whole = call.in_features / kLinearStep * kLinearStep, rest = call.in_features - whole;
        Chunk chunk{};
        float scales[Vec::width] = {};
        for (int r = 0; r < kChunkRows; ++r) {
            const std::int64_t row = first_row + smaller(r, rows - 1);
            chunk.weights[r] = static_cast<const W*>(call.weight) + row * call.weight_stride;
            for (std::int64_t k = 0; k < rest; ++k) chunk.last[r][k] = chunk.weights[r][whole + k];
            scales[r] = kFactor<W> * row_scale(call, row);
        }
        for (std::int64_t token = first_token; token < stop; token += kLinearTokens) {
            float lanes[kLinearTokens][kChunkRows][Vec::width];
            const auto tokens = static_cast<int>(smaller(kLinearTokens, stop - token));
            const bool prefetches = token == first_token;
            switch (tokens) {
                case 1: sum_rows<1>(chunk, token, prefetches, lanes); break;
                case 2: sum_rows<2>(chunk, token, prefetches, lanes); break;
                case 3: sum_rows<3>(chunk, token, prefetches, lanes); break;
                default: sum_rows<kLinearTokens>(chunk, token, prefetches, lanes);
            }
            for (int t = 0; t < tokens; ++t) {
                const Vec sums = sum_over_masks(sums_over_lanes([&](int r) MGLU_STEP { return load(lanes[t][r]); }));
                float results[Vec::width];
                store(results, call.weight_scale ? sums * load(scales) : sums);
                float* out = static_cast<float*>(call.out) + (token + t) * call.out_stride + first_row;
                for (std::int64_t r = 0; r < rows; ++r) out[r] = results[r];
            }
        }
    }

    // Writes the sums of a chunk's rows to lanes[token][row].
    template <int Tokens>
    void sum_rows(const Chunk& chunk, std::int64_t token, bool prefetches,
                  float (*lanes)[kChunkRows][Vec::width]) const {
        const X* from = x + token * x_stride;
        const std::int64_t whole = call.in_features / kLinearStep * kLinearStep;
        constexpr int kRows = kLinearRows<Tokens>;
        for (int row = 0; row < kChunkRows; row += kRows) {
            Vec sums[kRows][Tokens];
            unrolled<kRows * Tokens>([&](auto i) MGLU_STEP { sums[i / Tokens][i % Tokens] = broadcast(0.0f); });
            const W* const* weights = chunk.weights + row;
            for (std::int64_t k = 0; k < whole; k += kLinearStep) {
                if (prefetches) {  // prefetch the next rows, which the hardware's prefetcher cannot all follow
                    unrolled<kRows>([&](auto r) MGLU_STEP {
                        __builtin_prefetch(weights[r] + kRows * call.weight_stride + k, 0, 2);
                    });
                }
                unrolled<kRows>([&](auto r) MGLU_STEP { add<Tokens>(weights[r] + k, from + k, sums[r]); });
            }
            if (whole < call.in_features) {
                unrolled<kRows>([&](auto r) MGLU_STEP { add<Tokens>(chunk.last[row + r], from + whole, sums[r]); });
            }
            unrolled<kRows * Tokens>(
                [&](auto i) MGLU_STEP { store(lanes[i % Tokens][row + i / Tokens], sums[i / Tokens][i % Tokens]); });
        }
    }

    // Multiplies one step of a row with each token and adds the products to the token's sums.
    template <int Tokens>
    MGLU_INLINE void add(const W* weights, const X* from, Vec (&sums)[Tokens]) const {
        const auto loaded = load_weights(weights);
        unrolled<Tokens>([&](auto t) MGLU_STEP { sums[t] = multiply_add(loaded, from + t * x_stride, sums[t]); });
    }
};

template <class E>
Status linear(const Forward& call, ParallelFor parallel_for) {
    return over_chunks<E, Linear>(call, parallel_for, kLinearStep);
}
