// The formats in which W is stored, for the kernels of GPUs and of CPUs; mglu_ops/formats.py describes the same ones.
#pragma once

namespace mglu {

enum class WeightFormat : long long {
    dense = 0,  // in x's type
};

}  // namespace mglu
