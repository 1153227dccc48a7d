// The layout of the packed mask format, version 1 (mglu_ops/masks.py), for device code and for the CPU kernels.
//
// packed_masks is uint8 [out_features, packed_octets(in_features), n_masks]. An octet is eight consecutive columns of
// W, k to k + 7 with k % 8 == 0. Each mask has one byte for an octet: bit k % 8 (least significant first) of byte [r, k
// / 8, i] is M_i[r, k]. The bits past in_features in a row's last octet are 0.
#pragma once

#if defined(__CUDACC__)
#define MGLU_HOST_DEVICE __host__ __device__
#else
#define MGLU_HOST_DEVICE
#endif

namespace mglu {

constexpr int kOctet = 8;  // columns of an octet
constexpr int kMaxMasks = 16;

// Octets of a row: ceil(in_features / 8).
template <class Int>
MGLU_HOST_DEVICE constexpr Int packed_octets(Int in_features) {
    return (in_features + (kOctet - 1)) / kOctet;
}

// The number of contiguous bytes that hold all masks of `columns` columns of a row; `columns` is a multiple of 8.
template <class Int>
MGLU_HOST_DEVICE constexpr Int mask_bytes(Int columns, Int n_masks) {
    return columns / kOctet * n_masks;
}

// mask_bit() reads the bit of column j of an octet from a mask's byte. as_mask_bit() returns a byte with `bit` as the
// bit of column j and zeros elsewhere.
template <class Byte>
MGLU_HOST_DEVICE constexpr bool mask_bit(Byte byte, int j) {
    return byte >> j & 1;
}
MGLU_HOST_DEVICE constexpr unsigned int as_mask_bit(bool bit, int j) { return static_cast<unsigned int>(bit) << j; }

}  // namespace mglu
