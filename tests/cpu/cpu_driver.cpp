// Compares the CPU kernels with sums in float64, in a separate program so that sanitizers can watch it.
// tests/cpu/test_cpu_kernels.py runs it. It prints a line for each instruction set that ran and for each mistake, and
// its exit status is nonzero if there was a mistake.
//
// Every tensor is an allocation of exactly its size, so that sanitizers see reads past its end. Rows have a few
// elements between them, so that they start at different alignments.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "backward.h"
#include "mglu_cpu.h"

namespace {

using namespace mglu::cpu;

std::mt19937 generator(0);
int mistakes = 0;

constexpr const char* kIsaNames[] = {"best", "portable", "avx2", "avx512", "avx512_bf16", "amx"};

float uniform() { return std::uniform_real_distribution<float>(-1, 1)(generator); }

std::uint32_t bits_of(float x) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, sizeof(bits));
    return bits;
}

// Numbers of few bits, which all three types hold exactly. Rounding is left to the tests in Python, which compare
// conversions with torch's.
struct Numbers {
    DType dtype;
    std::vector<float> floats;
    std::vector<std::uint16_t> halves;

    Numbers(DType type, std::size_t count) : dtype(type) {
        (type == DType::float32 ? floats.resize(count), 0 : (halves.resize(count), 0));
    }
    void set(std::size_t i, float x) {
        if (dtype == DType::float32) floats[i] = x;
        if (dtype == DType::bfloat16) halves[i] = static_cast<std::uint16_t>(bits_of(x) >> 16);
        if (dtype == DType::float16) {  // valid for normal numbers
            const std::uint32_t magnitude = bits_of(x) & 0x7fffffff, sign = bits_of(x) >> 16 & 0x8000;
            halves[i] = static_cast<std::uint16_t>(sign | (magnitude ? (magnitude >> 13) - 0x1c000 : 0));
        }
    }
    float get(std::size_t i) const {
        if (dtype == DType::float32) return floats[i];
        std::uint32_t bits = static_cast<std::uint32_t>(halves[i]) << 16;
        if (dtype == DType::float16) {
            const std::uint32_t magnitude = halves[i] & 0x7fff;
            const std::uint32_t sign = static_cast<std::uint32_t>(halves[i] & 0x8000) << 16;
            if (magnitude < 0x400) return (sign ? -1.0f : 1.0f) * std::ldexp(static_cast<float>(magnitude), -24);
            bits = sign | ((magnitude << 13) + 0x38000000);
        }
        float x;
        std::memcpy(&x, &bits, sizeof(x));
        return x;
    }
    void* data() { return dtype == DType::float32 ? static_cast<void*>(floats.data()) : halves.data(); }
};

// Runs the work on two threads, so that the thread sanitizer can see data races.
std::int32_t two_threads(std::int64_t begin, std::int64_t end, std::int64_t grain, Body body, void* context) {
    if (end - begin <= grain) return serial(begin, end, grain, body, context);
    const std::int64_t middle = begin + (end - begin) / 2;
    std::thread other([=] { body(middle, end, context); });
    body(begin, middle, context);
    other.join();
    return 0;
}

double activate(Activation name, double x) {
    switch (name) {
        case Activation::silu: return x / (1 + std::exp(-x));
        case Activation::gelu: return 0.5 * x * (1 + std::erf(x / std::sqrt(2.0)));
        case Activation::gelu_tanh:
            return 0.5 * x * (1 + std::tanh(std::sqrt(2 / 3.14159265358979323846) * (x + 0.044715 * x * x * x)));
        case Activation::relu: return x > 0 ? x : 0;
        case Activation::sigmoid: return 1 / (1 + std::exp(-x));
        case Activation::tanh: return std::tanh(x);
        case Activation::identity: return x;
        case Activation::relu_squared: return x > 0 ? x * x : 0;
    }
    return NAN;
}

void check(Isa isa, DType dtype, std::int64_t tokens, std::int64_t d, std::int64_t h, std::int64_t n,
           Activation activation, bool weighted, mglu::WeightFormat format = mglu::WeightFormat::dense) {
    const std::int64_t octets = (h + 7) / 8, x_stride = h + 3, w_stride = h + 1, m_stride = octets * n + 1;
    const auto rows = [](std::int64_t count, std::int64_t stride, std::int64_t width) {
        return static_cast<std::size_t>(count ? (count - 1) * stride + width : 0);
    };
    const bool is_dense = format == mglu::WeightFormat::dense;
    Numbers x(dtype, rows(tokens, x_stride, h)), weight(is_dense ? dtype : DType::float32, rows(d, w_stride, h));
    std::vector<std::uint8_t> bytes(is_dense ? 0 : rows(d, w_stride, h));
    Numbers mask_weight(DType::bfloat16, static_cast<std::size_t>(tokens * n));
    const DType out_dtype = n ? dtype : DType::float32;  // without masks the result is the product in float32
    Numbers out(out_dtype, rows(tokens, d + 2, d));
    std::vector<std::uint8_t> masks(static_cast<std::size_t>(n * d * h)), packed(rows(d, m_stride, octets * n));
    const float scale = std::exp2(-std::round(std::log2(static_cast<float>(h + 1)) / 2));  // about h^-1/2
    for (std::int64_t t = 0; t < tokens; ++t) {
        for (std::int64_t k = 0; k < h; ++k) x.set(t * x_stride + k, std::round(uniform() * 64) / 16);
    }
    for (std::int64_t r = 0; r < d; ++r) {
        for (std::int64_t k = 0; k < h; ++k) weight.set(r * w_stride + k, std::round(uniform() * 64) / 64 * scale);
    }
    for (std::size_t i = 0; i < bytes.size(); ++i) {  // fp8 numbers are multiples of 1/8, of magnitude 1 to 15/8
        bytes[i] = static_cast<std::uint8_t>(generator());
        const bool is_int8 = format == mglu::WeightFormat::int8_row;
        if (!is_int8) bytes[i] = (bytes[i] & 0x87) | 0x38;
        const float eighths = (bytes[i] & 0x80 ? -1.0f : 1.0f) * static_cast<float>(8 + (bytes[i] & 7));
        weight.set(i, (is_int8 ? static_cast<std::int8_t>(bytes[i]) / 64.0f : eighths / 8) * scale);
    }
    const std::vector<float> scales(static_cast<std::size_t>(d),
                                    format == mglu::WeightFormat::int8_row ? scale / 64 : scale);
    for (std::int64_t i = 0; i < tokens * n; ++i) mask_weight.set(i, std::round(uniform() * 64) / 64);
    for (auto& mask : masks) mask = uniform() < 0 ? 0 : 1;

    // Pack with pack_masks, whose layout the kernels read, and then copy the rows to a larger stride.
    std::vector<std::uint8_t> contiguous(static_cast<std::size_t>(d * octets * n)), back(masks.size());
    const Pack pack{masks.data(), contiguous.data(), n, d, h, d * h, h, 1};
    const Unpack unpack{contiguous.data(), back.data(), n, d, h, octets * n, n, 1};
    const bool packs =
        n == 0 || (pack_masks(pack, two_threads) == Status::ok && unpack_masks(unpack, two_threads) == Status::ok);
    if (!packs || back != masks) {
        ++mistakes;
        std::printf("pack: n=%lld d=%lld h=%lld\n", (long long)n, (long long)d, (long long)h);
    }
    for (std::int64_t r = 0; r < d; ++r) {
        for (std::int64_t i = 0; i < octets * n; ++i) packed[r * m_stride + i] = contiguous[r * octets * n + i];
    }

    Forward call{x.data(),
                 is_dense ? weight.data() : bytes.data(),
                 packed.data(),
                 weighted ? mask_weight.data() : nullptr,
                 is_dense ? nullptr : scales.data(),
                 out.data(),
                 nullptr,
                 tokens,
                 d,
                 h,
                 n,
                 x_stride,
                 w_stride,
                 m_stride,
                 n,
                 1,
                 d + 2,
                 dtype,
                 DType::bfloat16,
                 format,
                 activation,
                 isa};
    std::vector<double> exact(static_cast<std::size_t>(tokens * d)), activated(exact.size());
    for (std::int64_t t = 0; t < tokens; ++t) {
        for (std::int64_t r = 0; r < d; ++r) {
            for (std::int64_t i = 0; i < n; ++i) {
                double gate = 0, value = 0;
                for (std::int64_t k = 0; k < h; ++k) {
                    const double product = static_cast<double>(x.get(t * x_stride + k)) * weight.get(r * w_stride + k);
                    (masks[(i * d + r) * h + k] ? gate : value) += product;
                }
                const double act = activate(activation, gate) * (weighted ? mask_weight.get(t * n + i) : 1.0f);
                exact[t * d + r] += act * value;
                activated[t * d + r] += act;
            }
            for (std::int64_t k = 0; n == 0 && k < h; ++k)
                exact[t * d + r] += static_cast<double>(x.get(t * x_stride + k)) * weight.get(r * w_stride + k);
        }
    }
    const double budget = out_dtype == DType::float32 ? 1e-6 : out_dtype == DType::float16 ? 1e-3 : 8e-3;
    const auto compare = [&](const char* what, Status status, const std::vector<double>& wanted, auto get) {
        double error = 0, size = 0;
        for (std::int64_t t = 0; t < tokens; ++t) {
            for (std::int64_t r = 0; r < d; ++r) {
                const double difference = get(t, r) - wanted[t * d + r];
                error += difference * difference;
                size += wanted[t * d + r] * wanted[t * d + r];
            }
        }
        if (status == Status::ok && std::sqrt(error) <= budget * std::sqrt(size) + 1e-7) return;
        ++mistakes;
        std::printf("%s, %s: status %d dtype=%lld tokens=%lld d=%lld h=%lld n=%lld act=%lld weighted=%d: %g of %g\n",
                    kIsaNames[static_cast<int>(isa)], what, static_cast<int>(status), (long long)dtype,
                    (long long)tokens, (long long)d, (long long)h, (long long)n, (long long)activation, weighted,
                    std::sqrt(error), std::sqrt(size));
    };
    const auto result = [&](std::int64_t t, std::int64_t r) -> double { return out.get(t * (d + 2) + r); };
    compare("forward", forward(call, two_threads), exact, result);

    // In training, the sum of dy/dt and all dy/df_i is the sum of the activations times the mask weights.
    if (h == 0 || n == 0 || !is_dense) return;
    const std::int64_t entries = partials_of(call);
    Numbers partials(dtype, static_cast<std::size_t>(tokens * entries * d));
    for (std::int64_t i = 0; i < tokens * entries * d; ++i) partials.set(i, 1024.0f);
    call.partials = partials.data();
    const Status status = forward(call, two_threads);
    compare("result in training", status, exact, result);
    compare("partials", status, activated, [&](std::int64_t t, std::int64_t r) {
        double sum = 0;
        for (std::int64_t i = 0; i <= n; ++i) sum += partials.get((t * entries + i) * d + r);
        return sum;
    });
    if (!weighted) return;
    compare("partials of term_weights", status, exact, [&](std::int64_t t, std::int64_t r) {
        double sum = 0;
        for (std::int64_t i = 0; i < n; ++i) {
            sum += partials.get((t * entries + 1 + n + i) * d + r) * mask_weight.get(t * n + i);
        }
        return sum;
    });
}

void check_refusals() {
    Forward call{};
    call.n_masks = 17;
    mistakes += forward(call, serial) != Status::invalid_argument;
    call.n_masks = -1;
    mistakes += forward(call, serial) != Status::invalid_argument;
    call.n_masks = 1;
    mistakes += forward(call, nullptr) != Status::invalid_argument;
    call.tokens = -1;
    mistakes += forward(call, serial) != Status::invalid_argument;
    call.tokens = 0;
    mistakes += forward(call, serial) != Status::ok;
    call.dtype = static_cast<DType>(3);
    mistakes += forward(call, serial) != Status::invalid_argument;
}

// Compares the steps of a backward pass with plain loops. The numbers are small integers, so that all sums are exact.
void check_backward(std::int64_t tokens, std::int64_t d, std::int64_t h, std::int64_t n, DType wide) {
    const std::int64_t octets = (h + 7) / 8, w_stride = h + 3, g_stride = d + 1, entries = n + 1;
    const auto numbers = [](DType dtype, std::int64_t count) {
        Numbers made(dtype, static_cast<std::size_t>(count));
        for (std::int64_t i = 0; i < count; ++i) made.set(static_cast<std::size_t>(i), std::round(uniform() * 3));
        return made;
    };
    constexpr DType kNarrow = DType::bfloat16;
    Numbers weight = numbers(kNarrow, d * w_stride), grad = numbers(kNarrow, tokens * g_stride);
    Numbers partials = numbers(kNarrow, tokens * entries * d), scaled = numbers(kNarrow, tokens * entries * d);
    Numbers products = numbers(kNarrow, n * d * h), flipped = numbers(kNarrow, entries * d * h);
    Numbers total = numbers(wide, d * h), of_weight = numbers(kNarrow, d * h), of_logits = numbers(wide, n * d * h);
    std::vector<float> of_mask_weights(static_cast<std::size_t>(tokens * n));
    std::vector<std::uint8_t> packed(static_cast<std::size_t>(d * octets * n));
    for (auto& byte : packed) byte = static_cast<std::uint8_t>(generator());
    const auto sign = [&](std::int64_t i, std::int64_t r, std::int64_t k) {
        return packed[static_cast<std::size_t>((r * octets + k / 8) * n + i)] >> k % 8 & 1 ? -1.0f : 1.0f;
    };

    const FlipSigns flip{weight.data(), packed.data(), flipped.data(), n, d, h, w_stride};
    const Scale times{grad.data(), partials.data(), scaled.data(), tokens, entries, d, g_stride, entries * d, d};
    const WeightGradients gradients{
        total.data(), products.data(), weight.data(), packed.data(), of_weight.data(), of_logits.data(), n, d, h,
        w_stride,     d * h,           wide,          wide};
    const MaskWeightGradients term_weights{
        grad.data(), partials.data(), of_mask_weights.data(), tokens, n, d, g_stride, entries * d, d};
    int wrong = flip_signs(flip, two_threads) != Status::ok || scale(times, two_threads) != Status::ok ||
                weight_gradients(gradients, two_threads) != Status::ok ||
                mask_weight_gradients(term_weights, two_threads) != Status::ok;
    for (std::int64_t r = 0; r < d; ++r) {
        for (std::int64_t k = 0; k < h; ++k) {
            const float w = weight.get(r * w_stride + k);
            float sum = total.get(r * h + k);
            wrong += flipped.get(r * h + k) != w;
            for (std::int64_t i = 0; i < n; ++i) {
                const float product = products.get((i * d + r) * h + k);
                sum += sign(i, r, k) * product;
                wrong += flipped.get(((i + 1) * d + r) * h + k) != sign(i, r, k) * w;
                wrong += of_logits.get((i * d + r) * h + k) != -2 * w * product;
            }
            wrong += of_weight.get(r * h + k) != sum;
        }
    }
    for (std::int64_t t = 0; t < tokens; ++t) {
        for (std::int64_t i = 0; i < entries; ++i) {
            float sum = 0;
            for (std::int64_t r = 0; r < d; ++r) {
                const std::int64_t at = (t * entries + i) * d + r;
                const float product = grad.get(t * g_stride + r) * partials.get(at);
                wrong += scaled.get(at) != product;
                sum += product;
            }
            if (i < n) wrong += of_mask_weights[static_cast<std::size_t>(t * n + i)] != sum;
        }
    }
    if (wrong) {
        ++mistakes;
        std::printf("backward: tokens=%lld d=%lld h=%lld n=%lld\n", (long long)tokens, (long long)d, (long long)h,
                    (long long)n);
    }
}

}  // namespace

int main() {
    check_refusals();
    if (supports(Isa::avx512_bf16, DType::bfloat16)) {
        const int before = mistakes;
        for (std::int64_t n = 1; n <= 16; ++n) {
            for (const std::int64_t h : {1, 7, 8, 31, 32, 33, 70}) check_backward(n % 4, h, h, n, DType::bfloat16);
            check_backward(3, 41, 72, n, DType::float32);
        }
        std::printf("ran backward: %d mistakes\n", mistakes - before);
    }
    for (const Isa isa : {Isa::portable, Isa::avx2, Isa::avx512, Isa::avx512_bf16, Isa::amx}) {
        if (!supports(isa, DType::bfloat16)) continue;
        const int before = mistakes;
        for (const DType dtype : {DType::float32, DType::bfloat16, DType::float16}) {
            if (!supports(isa, dtype)) continue;
            for (std::int64_t n = 1; n <= 16; ++n) {
                for (const std::int64_t tokens : {1, 2, 3, 5, 17}) {
                    const auto activation = static_cast<Activation>((n + tokens) % 7);
                    check(isa, dtype, tokens, 11, 8 * n + (tokens + n) % 8, n, activation, (n + tokens) % 2);
                }
            }
            for (const std::int64_t h : {0, 1, 7, 8, 9, 63, 300, 520}) {
                check(isa, dtype, 3, 9, h, 2, Activation::silu, false);
                check(isa, dtype, 9, 25, h, 3, Activation::silu, true);
            }
            for (const auto format : {mglu::WeightFormat::int8_row, mglu::WeightFormat::fp8_row}) {
                for (const std::int64_t h : {0, 1, 9, 63, 64, 130, 300}) {
                    for (const std::int64_t n : {1, 4, 9}) {
                        check(isa, dtype, n, 9, h, n, Activation::silu, true, format);
                        if (isa != Isa::amx) check(isa, dtype, n, 9, h, 0, Activation::identity, false, format);
                    }
                }
            }
            for (const std::int64_t h : {0, 1, 7, 8, 9, 63, 300, 520}) {
                for (const std::int64_t tokens : {1, 2, 3, 6})
                    if (isa != Isa::amx) check(isa, dtype, tokens, 13, h, 0, Activation::identity, false);
            }
            for (const std::int64_t tokens : {33, 700}) check(isa, dtype, tokens, 5, 40, 4, Activation::tanh, true);
            check(isa, dtype, 4, 0, 8, 1, Activation::silu, false);
        }
        std::printf("ran %s: %d mistakes\n", kIsaNames[static_cast<int>(isa)], mistakes - before);
    }
    return mistakes ? 1 : 0;
}
