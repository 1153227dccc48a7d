// The formats in which W is stored, for the kernels of GPUs and CPUs (mglu_ops/formats.py).
#pragma once

namespace mglu {

enum class WeightFormat : long long {
    dense = 0,       // in x's type
    fp8_row = 1,     // float8_e4m3fn, with a float32 scale for each row
    fp8_block = 2,   // float8_e4m3fn, with a float32 scale for each block of 128 x 128 weights
    int8_row = 3,    // int8, with a float32 scale for each row
    int4_group = 4,  // two weights in a byte, each stored as w + 8, with a bfloat16 scale for each 128 columns of a row
};

constexpr int kWeightFormats = 5;

// In fp8_block and int4_group this many columns share a scale. In fp8_block, so do this many rows.
constexpr int kScaledTogether = 128;

}  // namespace mglu
