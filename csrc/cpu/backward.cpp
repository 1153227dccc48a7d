// The elementwise steps of the backward pass (backward.h) with AVX-512, 32 elements at a time. All are memory-bound.
#include "backward.h"

#include "kernels.h"

#if defined(MGLU_BUILDS_BFLOAT16)
#include "avx512_target.h"

MGLU_BEGIN_AVX512("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16,f16c,fma")

namespace mglu::cpu {
namespace {

#include "vec_avx512.h"
#include "mask_words.h"

constexpr std::int64_t kLanes = 32;  // elements of a step: one register of bfloat16, and 4 bytes of each mask

// The 32 elements from `column` on. `valid` has a bit for each element that lies inside the row.
struct Step {
    std::int64_t column;
    __mmask32 valid;

    Step(std::int64_t first, std::int64_t columns) : column(first), valid(first_words(columns - first)) {}
};

MGLU_INLINE __m512i load_words(const void* base, std::int64_t at, Step step) {
    return _mm512_maskz_loadu_epi16(step.valid, static_cast<const BFloat16*>(base) + at + step.column);
}
MGLU_INLINE void store_words(void* base, std::int64_t at, Step step, __m512i words) {
    _mm512_mask_storeu_epi16(static_cast<BFloat16*>(base) + at + step.column, step.valid, words);
}

// 32 elements in float32.
struct Pair {
    Vec low, high;
};

MGLU_INLINE Vec widen_half(__m256i words) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16))};
}
MGLU_INLINE Pair widen_words(__m512i words) {
    return {widen_half(_mm512_castsi512_si256(words)), widen_half(_mm512_extracti64x4_epi64(words, 1))};
}
MGLU_INLINE Pair operator*(Pair a, Pair b) { return {a.low * b.low, a.high * b.high}; }
MGLU_INLINE Pair operator+(Pair a, Pair b) { return {a.low + b.low, a.high + b.high}; }
MGLU_INLINE Pair broadcast_pair(float x) { return {broadcast(x), broadcast(x)}; }

MGLU_INLINE Pair load_pair(const float* base, std::int64_t at, Step step) {
    const float* p = base + at + step.column;
    return {{_mm512_maskz_loadu_ps(static_cast<__mmask16>(step.valid), p)},
            {_mm512_maskz_loadu_ps(static_cast<__mmask16>(step.valid >> 16), p + 16)}};
}
MGLU_INLINE Pair load_pair(const BFloat16* base, std::int64_t at, Step step) {
    return widen_words(load_words(base, at, step));
}
MGLU_INLINE void store_pair(float* base, std::int64_t at, Step step, Pair a) {
    float* p = base + at + step.column;
    _mm512_mask_storeu_ps(p, static_cast<__mmask16>(step.valid), a.low.v);
    _mm512_mask_storeu_ps(p + 16, static_cast<__mmask16>(step.valid >> 16), a.high.v);
}
MGLU_INLINE void store_pair(BFloat16* base, std::int64_t at, Step step, Pair a) {
    store_words(base, at, step, bit_cast<__m512i>(_mm512_cvtne2ps_pbh(a.high.v, a.low.v)));
}

// Loads the masks of a step's weights from one row of the packed format.
MGLU_INLINE MaskWords load_masks(const std::uint8_t* row, std::int64_t n_masks, Step step, std::int64_t columns,
                                 __m512i order) {
    const std::int64_t octet = step.column / kOctet, left = packed_octets(columns) - octet;
    return {row + octet * n_masks, first_bytes(smaller(left, 4) * n_masks), order};
}

// Negates the bfloat16 numbers whose mask bit is 1.
MGLU_INLINE __m512i flip(const MaskWords& masks, std::int64_t mask, __m512i words) {
    return _mm512_xor_si512(words, masks.apply(mask, _mm512_set1_epi16(static_cast<short>(0x8000))));
}

void run(const FlipSigns& call, std::int64_t begin, std::int64_t end) {
    const std::int64_t columns = call.in_features, matrix = call.out_features * columns;
    const std::int64_t mask_stride = packed_octets(columns) * call.n_masks;
    const __m512i order = byte_order(call.n_masks);
    for (std::int64_t row = begin; row < end; ++row) {
        const std::uint8_t* row_masks = call.packed_masks + row * mask_stride;
        for (std::int64_t column = 0; column < columns; column += kLanes) {
            const Step step(column, columns);
            const MaskWords masks = load_masks(row_masks, call.n_masks, step, columns, order);
            const __m512i weights = load_words(call.weight, row * call.weight_stride, step);
            store_words(call.out, row * columns, step, weights);
            for (std::int64_t i = 0; i < call.n_masks; ++i) {
                store_words(call.out, (i + 1) * matrix + row * columns, step, flip(masks, i, weights));
            }
        }
    }
}

void run(const Scale& call, std::int64_t begin, std::int64_t end) {
    auto* out = static_cast<BFloat16*>(call.out);
    const auto* grad = static_cast<const BFloat16*>(call.grad_output);
    const auto* partials = static_cast<const BFloat16*>(call.partials);
    for (std::int64_t token = begin; token < end; ++token) {
        for (std::int64_t entry = 0; entry < call.entries; ++entry) {
            const std::int64_t from = token * call.partials_stride + entry * call.entry_stride;
            const std::int64_t to = (token * call.entries + entry) * call.columns;
            for (std::int64_t column = 0; column < call.columns; column += kLanes) {
                const Step step(column, call.columns);
                const Pair gradient = load_pair(grad, token * call.grad_stride, step);
                store_pair(out, to, step, gradient * load_pair(partials, from, step));
            }
        }
    }
}

template <class Total, class Logits>
void run_typed(const WeightGradients& call, std::int64_t begin, std::int64_t end) {
    const auto* total = static_cast<const Total*>(call.total);
    const auto* weight = static_cast<const BFloat16*>(call.weight);
    auto* grad_weight = static_cast<BFloat16*>(call.grad_weight);
    auto* grad_logits = static_cast<Logits*>(call.grad_logits);
    const std::int64_t columns = call.in_features, matrix = call.out_features * columns;
    const std::int64_t mask_stride = packed_octets(columns) * call.n_masks;
    const __m512i order = byte_order(call.n_masks);
    const Pair minus_two = broadcast_pair(-2.0f);
    for (std::int64_t row = begin; row < end; ++row) {
        const std::uint8_t* row_masks = call.packed_masks + row * mask_stride;
        const std::int64_t at = row * columns;
        for (std::int64_t column = 0; column < columns; column += kLanes) {
            const Step step(column, columns);
            Pair factor{}, sum{};
            if (grad_logits) factor = minus_two * load_pair(weight, row * call.weight_stride, step);
            if (grad_weight) sum = load_pair(total, at, step);
            const MaskWords masks = load_masks(row_masks, call.n_masks, step, columns, order);
            for (std::int64_t i = 0; i < call.n_masks; ++i) {
                const __m512i product = load_words(call.products, i * matrix + at, step);
                if (grad_weight) sum = sum + widen_words(flip(masks, i, product));
                if (grad_logits) {
                    store_pair(grad_logits, i * call.logits_stride + at, step, factor * widen_words(product));
                }
            }
            if (grad_weight) store_pair(grad_weight, at, step, sum);
        }
    }
}

template <class Total>
void run_with_total(const WeightGradients& call, std::int64_t begin, std::int64_t end) {
    const bool wide = call.logits_dtype == DType::float32;
    wide ? run_typed<Total, float>(call, begin, end) : run_typed<Total, BFloat16>(call, begin, end);
}

void run(const WeightGradients& call, std::int64_t begin, std::int64_t end) {
    const bool wide = call.total_dtype == DType::float32;
    wide ? run_with_total<float>(call, begin, end) : run_with_total<BFloat16>(call, begin, end);
}

void run(const MaskWeightGradients& call, std::int64_t begin, std::int64_t end) {
    const auto* grad = static_cast<const BFloat16*>(call.grad_output);
    const auto* terms = static_cast<const BFloat16*>(call.terms);
    for (std::int64_t token = begin; token < end; ++token) {
        for (std::int64_t i = 0; i < call.n_masks; ++i) {
            Pair sums = broadcast_pair(0.0f);
            for (std::int64_t column = 0; column < call.columns; column += kLanes) {
                const Step step(column, call.columns);
                const Pair gradient = load_pair(grad, token * call.grad_stride, step);
                const Pair term = load_pair(terms, token * call.terms_stride + i * call.mask_stride, step);
                sums = {fma(gradient.low, term.low, sums.low), fma(gradient.high, term.high, sums.high)};
            }
            Vec sum = sums.low + sums.high;
            for (int lanes = Vec::width; lanes > 1; lanes /= 2) sum = pair_sums(sum, sum);
            float lanes[Vec::width];
            store(lanes, sum);
            call.out[token * call.n_masks + i] = lanes[0];
        }
    }
}

}  // namespace
}  // namespace mglu::cpu

MGLU_END_AVX512
#endif

namespace mglu::cpu {
namespace {

constexpr std::int64_t kElementsPerTask = 1 << 15;  // a task of this size takes as long as waking a thread

bool are_sizes(std::int64_t n_masks, std::int64_t rows, std::int64_t columns) {
    return n_masks >= 0 && n_masks <= kMaxMasks && rows >= 0 && columns >= 0;
}
bool is_written(DType dtype) { return dtype == DType::float32 || dtype == DType::bfloat16; }

bool is_valid(const FlipSigns& call) {
    return call.n_masks > 0 && are_sizes(call.n_masks, call.out_features, call.in_features);
}
bool is_valid(const Scale& call) { return are_sizes(call.entries - 1, call.tokens, call.columns); }
bool is_valid(const WeightGradients& call) {
    return call.n_masks > 0 && are_sizes(call.n_masks, call.out_features, call.in_features) &&
           is_written(call.total_dtype) && is_written(call.logits_dtype);
}
bool is_valid(const MaskWeightGradients& call) { return are_sizes(call.n_masks, call.tokens, call.columns); }

// Runs one elementwise step on all rows. A row has `row_elements` elements.
template <class Call>
Status over_rows(const Call& call, ParallelFor parallel_for, std::int64_t rows, std::int64_t row_elements) {
    if (!is_valid(call) || !parallel_for) return Status::invalid_argument;
    if (!supports(Isa::avx512_bf16, DType::bfloat16)) return Status::unsupported_isa;
#if defined(MGLU_BUILDS_BFLOAT16)
    const auto body = [&](std::int64_t begin, std::int64_t end) { run(call, begin, end); };
    if (rows > 0) return over_ranges(parallel_for, rows, ceil_div(kElementsPerTask, row_elements + 1), body);
#endif
    return Status::ok;
}

}  // namespace

Status flip_signs(const FlipSigns& call, ParallelFor parallel_for) {
    return over_rows(call, parallel_for, call.out_features, (call.n_masks + 1) * call.in_features);
}

Status scale(const Scale& call, ParallelFor parallel_for) {
    return over_rows(call, parallel_for, call.tokens, call.entries * call.columns);
}

Status weight_gradients(const WeightGradients& call, ParallelFor parallel_for) {
    return over_rows(call, parallel_for, call.out_features, (call.n_masks + 1) * call.in_features);
}

Status mask_weight_gradients(const MaskWeightGradients& call, ParallelFor parallel_for) {
    return over_rows(call, parallel_for, call.tokens, call.n_masks * call.columns);
}

}  // namespace mglu::cpu

MGLU_EXPORT_CALL(flip_signs, FlipSigns)
MGLU_EXPORT_CALL(scale, Scale)
MGLU_EXPORT_CALL(weight_gradients, WeightGradients)
MGLU_EXPORT_CALL(mask_weight_gradients, MaskWeightGradients)
