// Masks to bits and back.
#include "kernels.h"

namespace mglu::cpu {
namespace {

constexpr std::int64_t kBytesOfTask = 1 << 16;

bool sizes_are_valid(std::int64_t n_masks, std::int64_t out_features, std::int64_t in_features) {
    return n_masks >= 1 && n_masks <= kMaxMasks && out_features >= 0 && in_features >= 0;
}

// Eight bytes that are 0 or not, as eight bits: what is not 0 carries into its byte's top bit and no further, and a
// product gathers the eight bits, each where no other lands.
std::uint8_t bits_of_bytes(std::uint64_t bytes) {
    constexpr std::uint64_t kLow = 0x7f7f7f7f7f7f7f7f;
    const std::uint64_t top = (((bytes & kLow) + kLow) | bytes) & ~kLow;
    return static_cast<std::uint8_t>((top >> 7) * 0x0102040810204080 >> 56);
}

// The inverse: bit k of a byte to byte k, as 0 or 1.
std::uint64_t bytes_of_bits(std::uint8_t bits) {
    constexpr std::uint64_t kLow = 0x7f7f7f7f7f7f7f7f;
    const std::uint64_t alone = bits * std::uint64_t{0x0101010101010101} & 0x8040201008040201;
    return ((alone + kLow) & ~kLow) >> 7;
}

void pack_rows(const Pack& call, std::int64_t begin, std::int64_t end) {
    const std::int64_t octets = ceil_div(call.in_features, 8);
    for (std::int64_t row = begin; row < end; ++row) {
        std::uint8_t* to = call.packed_masks + row * octets * call.n_masks;
        for (std::int64_t i = 0; i < call.n_masks; ++i) {
            const std::uint8_t* from = call.masks + i * call.mask_stride + row * call.row_stride;
            for (std::int64_t octet = 0; octet < octets; ++octet) {
                const std::int64_t used = smaller(8, call.in_features - 8 * octet);
                std::uint64_t bytes = 0;  // byte k is mask k, as a little-endian load has it
                for (std::int64_t k = 0; k < used; ++k) {
                    bytes |= std::uint64_t{from[(8 * octet + k) * call.column_stride]} << 8 * k;
                }
                to[octet * call.n_masks + i] = bits_of_bytes(bytes);
            }
        }
    }
}

void unpack_rows(const Unpack& call, std::int64_t begin, std::int64_t end) {
    const std::int64_t octets = ceil_div(call.in_features, 8);
    for (std::int64_t row = begin; row < end; ++row) {
        for (std::int64_t i = 0; i < call.n_masks; ++i) {
            const std::uint8_t* from = call.packed_masks + row * call.row_stride + i * call.mask_stride;
            std::uint8_t* to = call.masks + (i * call.out_features + row) * call.in_features;
            for (std::int64_t octet = 0; octet < octets; ++octet) {
                const std::uint64_t bytes = bytes_of_bits(from[octet * call.octet_stride]);
                const std::int64_t used = smaller(8, call.in_features - 8 * octet);
                for (std::int64_t k = 0; k < used; ++k) to[8 * octet + k] = static_cast<std::uint8_t>(bytes >> 8 * k);
            }
        }
    }
}

template <class Call, void (*Rows)(const Call&, std::int64_t, std::int64_t)>
Status over_rows(const Call& call, ParallelFor parallel_for) {
    if (!sizes_are_valid(call.n_masks, call.out_features, call.in_features) || !parallel_for) {
        return Status::invalid_argument;
    }
    if (call.out_features == 0 || call.in_features == 0) return Status::ok;
    const auto body = [](std::int64_t begin, std::int64_t end, void* context) {
        Rows(*static_cast<const Call*>(context), begin, end);
    };
    const std::int64_t grain = ceil_div(kBytesOfTask, call.n_masks * call.in_features);
    return parallel_for(0, call.out_features, grain, body, const_cast<Call*>(&call)) ? Status::parallel_for_failed
                                                                                      : Status::ok;
}

}  // namespace

Status pack_masks(const Pack& call, ParallelFor parallel_for) {
    return over_rows<Pack, pack_rows>(call, parallel_for);
}

Status unpack_masks(const Unpack& call, ParallelFor parallel_for) {
    return over_rows<Unpack, unpack_rows>(call, parallel_for);
}

}  // namespace mglu::cpu
