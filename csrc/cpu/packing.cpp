// Packs masks to one bit each, and unpacks them.
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kernels.h"

namespace mglu::cpu {
namespace {

constexpr std::int64_t kBytesPerTask = 1 << 16;

// Sets bit k of the result if byte k is not zero. Adding 0x7f to a byte's low seven bits carries into its top bit if
// any of them is set, and no further. The multiplication then gathers the eight top bits into one byte.
std::uint8_t bits_of_bytes(std::uint64_t bytes) {
    constexpr std::uint64_t kLow = 0x7f7f7f7f7f7f7f7f;
    const std::uint64_t top = (((bytes & kLow) + kLow) | bytes) & ~kLow;
    return static_cast<std::uint8_t>((top >> 7) * 0x0102040810204080 >> 56);
}

// The inverse of bits_of_bytes(): bit k of a byte becomes byte k, which is 0 or 1.
std::uint64_t bytes_of_bits(std::uint8_t bits) {
    constexpr std::uint64_t kLow = 0x7f7f7f7f7f7f7f7f;
    const std::uint64_t alone = bits * std::uint64_t{0x0101010101010101} & 0x8040201008040201;
    return ((alone + kLow) & ~kLow) >> 7;
}

// Packs eight consecutive elements of a mask into the bits of a byte. Loads assume a little-endian machine.
template <MaskSource source>
struct Octet {
    using Element = std::conditional_t<source == MaskSource::float32, std::int32_t, std::int16_t>;
    static constexpr Element kInfinity = static_cast<Element>(source == MaskSource::float32    ? 0x7f800000
                                                              : source == MaskSource::bfloat16 ? 0x7f80
                                                                                               : 0x7c00);

    // As a signed integer, the bits of a positive float other than NaN lie in 1 .. kInfinity.
    static bool is_set(Element bits) { return bits > 0 && bits <= kInfinity; }

    static std::uint8_t bits(const std::uint8_t* from) {
        std::uint32_t byte = 0;
        for (int k = 0; k < 8; ++k) {
            Element element;
            std::memcpy(&element, from + k * sizeof element, sizeof element);
            byte |= as_mask_bit(is_set(element), k);
        }
        return static_cast<std::uint8_t>(byte);
    }
};
template <>
struct Octet<MaskSource::bytes> {
    using Element = std::uint8_t;
    static bool is_set(Element byte) { return byte != 0; }
    static std::uint8_t bits(const std::uint8_t* from) {
        std::uint64_t bytes;
        std::memcpy(&bytes, from, sizeof bytes);
        return bits_of_bytes(bytes);
    }
};

// Packs a contiguous row of one mask, 8 columns at a time. The packed bytes are n_masks apart in `to`.
template <MaskSource source>
void pack_octets(const std::uint8_t* from, std::uint8_t* to, std::int64_t octets, std::int64_t n_masks) {
    constexpr std::int64_t kBytes = 8 * sizeof(typename Octet<source>::Element);
    for (std::int64_t octet = 0; octet < octets; ++octet)
        to[octet * n_masks] = Octet<source>::bits(from + octet * kBytes);
}

#if defined(__x86_64__)
// Packs eight float32 logits at a time: movemask gathers the sign bits of a comparison.
__attribute__((target("avx2"))) void pack_octets_avx2_float32(const std::uint8_t* from, std::uint8_t* to,
                                                              std::int64_t octets, std::int64_t n_masks) {
    for (std::int64_t octet = 0; octet < octets; ++octet) {
        const __m256 logits = _mm256_loadu_ps(reinterpret_cast<const float*>(from + 32 * octet));
        const __m256 positive = _mm256_cmp_ps(logits, _mm256_setzero_ps(), _CMP_GT_OQ);
        to[octet * n_masks] = static_cast<std::uint8_t>(_mm256_movemask_ps(positive));
    }
}

template <MaskSource source>
__attribute__((target("avx2"))) void pack_octets_avx2_16_bits(const std::uint8_t* from, std::uint8_t* to,
                                                              std::int64_t octets, std::int64_t n_masks) {
    const __m128i zero = _mm_setzero_si128(), past = _mm_set1_epi16(Octet<source>::kInfinity + 1);
    for (std::int64_t octet = 0; octet < octets; ++octet) {
        const __m128i logits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 16 * octet));
        const __m128i positive = _mm_and_si128(_mm_cmpgt_epi16(logits, zero), _mm_cmplt_epi16(logits, past));
        to[octet * n_masks] = static_cast<std::uint8_t>(_mm_movemask_epi8(_mm_packs_epi16(positive, zero)));
    }
}
#endif

using PackOctets = void (*)(const std::uint8_t*, std::uint8_t*, std::int64_t, std::int64_t);

template <MaskSource source>
PackOctets select_pack_octets() {
#if defined(__x86_64__)
    if constexpr (source != MaskSource::bytes) {
        if (has_avx2()) {
            if constexpr (source == MaskSource::float32) return &pack_octets_avx2_float32;
            if constexpr (source != MaskSource::float32) return &pack_octets_avx2_16_bits<source>;
        }
    }
#endif
    return &pack_octets<source>;
}

template <MaskSource source>
void pack_rows_of(const Pack& call, std::int64_t begin, std::int64_t end) {
    using Element = typename Octet<source>::Element;
    const PackOctets pack = select_pack_octets<source>();
    const std::int64_t octets = packed_octets(call.in_features);
    const std::int64_t whole = call.column_stride == sizeof(Element) ? call.in_features / kOctet : 0;
    for (std::int64_t row = begin; row < end; ++row) {
        for (std::int64_t i = 0; i < call.n_masks; ++i) {
            const std::uint8_t* from = call.masks + i * call.mask_stride + row * call.row_stride;
            std::uint8_t* to = call.packed_masks + row * octets * call.n_masks + i;
            pack(from, to, whole, call.n_masks);
            for (std::int64_t octet = whole; octet < octets; ++octet) {
                std::uint32_t bits = 0;
                for (std::int64_t k = 8 * octet; k < smaller(8 * octet + 8, call.in_features); ++k) {
                    Element element;
                    std::memcpy(&element, from + k * call.column_stride, sizeof element);
                    bits |= std::uint32_t{Octet<source>::is_set(element)} << (k - 8 * octet);
                }
                to[octet * call.n_masks] = static_cast<std::uint8_t>(bits);
            }
        }
    }
}

void pack_rows(const Pack& call, std::int64_t begin, std::int64_t end) {
    switch (call.source) {
        case MaskSource::bytes: return pack_rows_of<MaskSource::bytes>(call, begin, end);
        case MaskSource::float32: return pack_rows_of<MaskSource::float32>(call, begin, end);
        case MaskSource::bfloat16: return pack_rows_of<MaskSource::bfloat16>(call, begin, end);
        case MaskSource::float16: return pack_rows_of<MaskSource::float16>(call, begin, end);
    }
}

void unpack_rows(const Unpack& call, std::int64_t begin, std::int64_t end) {
    const std::int64_t octets = packed_octets(call.in_features);
    for (std::int64_t row = begin; row < end; ++row) {
        for (std::int64_t i = 0; i < call.n_masks; ++i) {
            const std::uint8_t* from = call.packed_masks + row * call.row_stride + i * call.mask_stride;
            std::uint8_t* to = call.masks + (i * call.out_features + row) * call.in_features;
            for (std::int64_t octet = 0; octet < octets; ++octet) {
                const std::uint64_t bytes = bytes_of_bits(from[octet * call.octet_stride]);
                const std::int64_t used = smaller(8, call.in_features - 8 * octet);
                for (std::int64_t k = 0; k < used; ++k) {
                    to[8 * octet + k] = static_cast<std::uint8_t>(bytes >> 8 * k);
                }
            }
        }
    }
}

template <class Call, void (*Rows)(const Call&, std::int64_t, std::int64_t)>
Status over_rows(const Call& call, ParallelFor parallel_for) {
    const bool is_valid =
        call.n_masks >= 1 && call.n_masks <= kMaxMasks && call.out_features >= 0 && call.in_features >= 0;
    if (!is_valid || !parallel_for) return Status::invalid_argument;
    if (call.out_features == 0 || call.in_features == 0) return Status::ok;
    return over_ranges(parallel_for, call.out_features, ceil_div(kBytesPerTask, call.n_masks * call.in_features),
                       [&](std::int64_t begin, std::int64_t end) { Rows(call, begin, end); });
}

}  // namespace

Status pack_masks(const Pack& call, ParallelFor parallel_for) {
    const auto source = static_cast<std::int64_t>(call.source);
    if (source < 0 || source > static_cast<std::int64_t>(MaskSource::float16)) return Status::invalid_argument;
    return over_rows<Pack, pack_rows>(call, parallel_for);
}

Status unpack_masks(const Unpack& call, ParallelFor parallel_for) {
    return over_rows<Unpack, unpack_rows>(call, parallel_for);
}

}  // namespace mglu::cpu
