#include "layer_call.h"

#include <algorithm>
#include <string>
#include <tuple>

#include "formats.h"
#include "masks.h"

namespace mglu {

namespace {

struct Activation {
    std::string_view name;
    int code;
};
constexpr Activation kActivations[] = {
#define MGLU_ACTIVATION(name, code, ...) {#name, code},
#include "../cpu/activation.h"
};

// Returns the entry of a list with this name, or refuses the argument.
template <typename List>
const auto& entry_of(const List& list, const char* argument, std::string_view wanted) {
    std::string names;
    for (const auto& known : list) {
        if (known.name == wanted) return known;
        names += (names.empty() ? "" : ", ") + std::string(known.name);
    }
    refuse(std::string(argument) + ": got '" + std::string(wanted) + "', must be one of " + names);
}

std::string for_format(const Format& format) { return " for weight_format='" + std::string(format.name) + "'"; }

// True if x is rounded to fp8_token, the only activation format other than dense.
bool rounds(std::string_view activation_format, const Tensor& x, const Format& format) {
    if (activation_format == "dense") return false;
    const std::string got = "activation_format: got '" + std::string(activation_format) + "', must be ";
    if (activation_format != "fp8_token") refuse(got + "one of dense, fp8_token");
    if (format.dtype != Scalar::float8_e4m3fn) refuse(got + "dense" + for_format(format));
    if (x.dtype == Scalar::float64)
        refuse("x: got dtype float64, must be float16, bfloat16 or float32 for activation_format='fp8_token'");
    return true;
}

// Returns the product of all sizes but the last. It cannot overflow, since torch has checked the number of elements.
std::int64_t count_rows(const Tensor& tensor) {
    std::int64_t rows = 1;
    for (std::int64_t i = 0; i + 1 < tensor.dims; ++i) rows *= tensor.sizes[i];
    return rows;
}

// Returns the distance in elements between the rows of a tensor that is viewed as a matrix. `folds` must hold.
std::int64_t row_stride(const Tensor& tensor) { return tensor.dims == 2 ? tensor.strides[0] : tensor.last_size(); }

// True if a tensor can be viewed as a matrix without a copy.
bool folds(const Tensor& tensor, bool any_column_stride) {
    const bool dense_columns = any_column_stride || tensor.last_size() <= 1 || tensor.last_stride() == 1;
    return tensor.dims <= 2 ? dense_columns : tensor.is_contiguous();
}

// True if x can be read in aligned 16-byte vectors, or if even a contiguous copy of x could not be read so.
bool has_vector_rows(const LayerCall& call) {
    const bool could_have =
        call.in_features % 8 == 0 && (call.x.dtype == Scalar::float16 || call.x.dtype == Scalar::bfloat16);
    const bool rows = call.tokens <= 1 || (call.x_row_stride % 8 == 0 && call.x_row_stride >= call.in_features);
    return !could_have || (rows && call.x.last_stride() == 1 && call.x.is_aligned());
}

}  // namespace

const Format& find_format(std::string_view weight_format) { return entry_of(kFormats, "weight_format", weight_format); }

void check_x_and_weight(const char* argument, const Tensor& x, const Tensor& weight, const Format& format) {
    const std::string name_of_x = argument;
    if (!is_floating(x.dtype)) refuse_dtype(argument, x.dtype, "must be floating");
    if (weight.dtype != format.dtype.value_or(x.dtype)) {
        const std::string dtype = format.dtype ? name(*format.dtype) : name_of_x + "'s dtype " + name(x.dtype);
        refuse_dtype("weight", weight.dtype, "must be " + dtype + for_format(format));
    }
    if (x.dims < 1) refuse(name_of_x + ": got 0 dimensions, must be 1 or more");
    if (weight.dims != 2)
        refuse("weight: got shape " + weight.shape() + ", must be [out_features, in_features" +
               (format.packed == 2 ? " / 2]" : "]"));
    if (const std::int64_t in_features = format.packed * weight.sizes[1]; x.last_size() != in_features)
        refuse(name_of_x + ": got last size " + std::to_string(x.last_size()) + " (shape " + x.shape() +
               "), must be weight's in_features " + std::to_string(in_features));
}

void check_scale(const std::optional<Tensor>& scale, const Tensor& x, const Tensor& weight, const Format& format) {
    if (!format.dtype) {
        if (scale)
            refuse("weight_scale: got a tensor of shape " + scale->shape() + ", must be None" + for_format(format));
        return;
    }
    const std::vector<std::int64_t> sizes = format.scale_sizes(weight.sizes[0], x.last_size());
    Tensor expected;
    expected.dims = static_cast<std::int64_t>(sizes.size());
    expected.sizes = sizes.data();
    const std::string dtype = name(format.scale_dtype);
    if (!scale) refuse("weight_scale: got None, must be " + dtype + " " + expected.shape() + for_format(format));
    if (scale->dtype != format.scale_dtype)
        refuse(std::string("weight_scale: got dtype ") + name(scale->dtype) + ", must be " + dtype +
               for_format(format));
    if (!std::equal(scale->sizes, scale->sizes + scale->dims, sizes.begin(), sizes.end()))
        refuse("weight_scale: got shape " + scale->shape() + ", must be " + expected.shape() + for_format(format));
    check_device("weight_scale", *scale, x);
}

void check_device(const char* argument, const Tensor& tensor, const Tensor& x, const char* name_of_x) {
    if (tensor.device != x.device || (x.device == Device::cuda && tensor.device_index != x.device_index))
        refuse(std::string(argument) + ": got device " + tensor.device_name() + ", must be " + name_of_x +
               "'s device " + x.device_name());
}

std::vector<std::int64_t> LayerCall::result_sizes() const {
    std::vector<std::int64_t> sizes(x.sizes, x.sizes + x.dims);
    sizes.back() = out_features;
    return sizes;
}

LayerCall describe(const Given<Tensor>& given) {
    const auto& [x, weight, packed_masks] = std::tie(given.x, given.weight, given.packed_masks);
    const std::optional<Tensor>& weight_scale = given.weight_scale;
    const Format& format = find_format(given.weight_format);
    check_x_and_weight("x", x, weight, format);
    check_device("weight", weight, x);
    const bool rounds_x = rounds(given.activation_format, x, format);
    check_scale(weight_scale, x, weight, format);
    check_packed(packed_masks, x.last_size());
    if (packed_masks.sizes[0] != weight.sizes[0])
        refuse("packed_masks: got shape " + packed_masks.shape() + ", must have weight's out_features " +
               std::to_string(weight.sizes[0]));
    check_device("packed_masks", packed_masks, x);
    LayerCall call{given};
    call.format = format.code;
    call.rounds_x = rounds_x;
    call.activation_code = entry_of(kActivations, "activation", given.activation).code;
    call.tokens = count_rows(x);
    call.out_features = weight.sizes[0];
    call.in_features = x.last_size();
    call.n_masks = packed_masks.sizes[2];
    call.x_row_stride = row_stride(x);
    if (call.mask_weights) check_mask_weights(call, call.result_sizes());
    return call;
}

void check_mask_weights(LayerCall& call, const std::vector<std::int64_t>& result_sizes) {
    const Tensor& mask_weights = *call.mask_weights;
    if (!is_floating(mask_weights.dtype)) refuse_dtype("mask_weights", mask_weights.dtype, "must be floating");
    const bool same_tokens = mask_weights.dims == static_cast<std::int64_t>(result_sizes.size()) &&
                             std::equal(result_sizes.begin(), result_sizes.end() - 1, mask_weights.sizes);
    if (!same_tokens || mask_weights.last_size() != call.n_masks)
        refuse("mask_weights: got shape " + mask_weights.shape() + ", must be the result's leading sizes and n_masks");
    check_device("mask_weights", mask_weights, call.x);
    call.mask_weight_row_stride = row_stride(mask_weights);
}

// The CPU kernels need contiguous rows. On a GPU, there are plans for any strides of W and of the masks. The tuned
// kernels read x in 16-byte vectors; if x is rounded, they read the rounded copy, which always allows that. All kernels
// need contiguous scales.
Copies needed_copies(const LayerCall& call) {
    const bool on_cpu = call.x.device == Device::cpu;
    const Tensor& masks = call.packed_masks;
    const bool dense_masks =
        (call.n_masks == 1 || masks.strides[2] == 1) && (masks.sizes[1] <= 1 || masks.strides[1] == call.n_masks);
    Copies copies{};
    copies.x = !folds(call.x, !on_cpu) || (!on_cpu && !call.rounds_x && !has_vector_rows(call));
    copies.weight = on_cpu && call.weight.sizes[1] > 1 && call.weight.strides[1] != 1;
    copies.packed_masks = on_cpu && !dense_masks;
    copies.mask_weights = call.mask_weights && !folds(*call.mask_weights, true);
    copies.weight_scale = call.weight_scale && !call.weight_scale->is_contiguous();
    return copies;
}

}  // namespace mglu
