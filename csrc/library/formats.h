// The formats of weights, with the facts that checks of a call need, as in mglu_ops/formats.py.
#pragma once

#include <iterator>
#include <optional>
#include <string_view>
#include <vector>

#include "../cuda/weight_formats.cuh"
#include "tensor.h"

namespace mglu {

struct Format {
    std::string_view name;
    WeightFormat code;
    std::optional<Scalar> dtype;  // dtype of the stored weight; none for dense, which has x's dtype and no scales
    Scalar scale_dtype = Scalar::float32;
    std::int64_t rows = 1;     // rows that share a scale
    std::int64_t columns = 0;  // columns that share a scale; 0 for whole rows
    std::int64_t packed = 1;   // columns in an element of the stored weight

    std::vector<std::int64_t> scale_sizes(std::int64_t out_features, std::int64_t in_features) const {
        std::vector<std::int64_t> sizes{ceil_div(out_features, rows)};
        if (columns > 0) sizes.push_back(ceil_div(in_features, columns));
        return sizes;
    }

    static constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
};

constexpr Format kFormats[] = {
    {"dense", WeightFormat::dense, {}},
    {"fp8_row", WeightFormat::fp8_row, Scalar::float8_e4m3fn},
    {"fp8_block", WeightFormat::fp8_block, Scalar::float8_e4m3fn, Scalar::float32, kScaledTogether, kScaledTogether},
    {"int8_row", WeightFormat::int8_row, Scalar::int8},
    {"int4_group", WeightFormat::int4_group, Scalar::uint8, Scalar::bfloat16, 1, kScaledTogether, 2},
};
static_assert(std::size(kFormats) == kWeightFormats);

}  // namespace mglu
