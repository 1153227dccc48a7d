// Replaces csrc/cuda/element.cuh for a C++ compiler.
#pragma once
#include "ptx.cuh"

namespace mglu {

enum ElementType : int { kFloat16 = 0, kBfloat16 = 1, kFloat32 = 2 };

template <int kType>
struct Element {
    using Bits = u16;
};
template <>
struct Element<kFloat32> {
    using Bits = u32;
};

template <class To, class From>
To with_bits_of(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof(to));
    return to;
}

template <int kType>
float to_float(typename Element<kType>::Bits bits) {
    if constexpr (kType == kFloat32) return with_bits_of<float>(bits);
    else if constexpr (kType == kBfloat16) return with_bits_of<float>(static_cast<u32>(bits) << 16);
    else return static_cast<float>(with_bits_of<_Float16>(bits));
}

// Rounds to nearest, ties to even.
template <int kType>
typename Element<kType>::Bits from_float(float value) {
    if constexpr (kType == kFloat16) return with_bits_of<u16>(static_cast<_Float16>(value));
    const u32 bits = with_bits_of<u32>(value);
    if constexpr (kType == kFloat32) return bits;
    return std::isnan(value) ? 0x7fff : static_cast<u16>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

template <int kType>
u32 from_floats(float first, float second) {
    return from_float<kType>(first) | static_cast<u32>(from_float<kType>(second)) << 16;
}

}  // namespace mglu
