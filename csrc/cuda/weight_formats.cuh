// The formats in which W is stored, for the kernels of GPUs and of CPUs; mglu_ops/formats.py describes the same ones.
#pragma once

namespace mglu {

enum class WeightFormat : long long {
    dense = 0,    // in x's type
    fp8_row = 1,  // float8_e4m3fn, with a float32 scale for each row
};

}  // namespace mglu
