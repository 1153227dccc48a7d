// What this library shares with mglu_ops in Python: the schemas of the operators, and the formats of weights with the
// facts that checks of a call need.
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
    std::optional<Scalar> dtype =
        std::nullopt;  // dtype of the stored weight; none for dense, which has x's dtype and no scales
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

// The schemas of the operators (kSchemas), and the formats by their codes (kFormats), written from Python's lists.
#include "contract.inc"

static_assert(std::size(kFormats) == kWeightFormats);

}  // namespace mglu
