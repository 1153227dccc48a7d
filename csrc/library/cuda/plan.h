// Plans describe the launches that compute a call, as data. Python's CUDA backend makes them
// (mglu_ops/backends/cuda/plans.py), and mglu_ops/packaging/device_code.py writes them as C++ tables. The functions
// below choose and run plans without knowing any kernel.
#pragma once

#include <compare>
#include <cstdint>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "../executor.h"
#include "driver.h"

namespace mglu::cuda {

// The values of a call and of its GPU on which plans may depend (`VARIABLES` in mglu_ops/backends/cuda/plans.py).
struct Values {
    std::int64_t rows;  // rows of x, or tokens of mglu::experts_down
    std::int64_t multiprocessors, shared_bytes_per_sm;
    std::int64_t out_features, in_features;
    std::int64_t x_row_stride, x_column_stride, x_is_vectorizable;  // strides count elements
    std::int64_t weight_row_stride, weight_column_stride;
    std::int64_t mask_row_stride, mask_octet_stride, mask_stride;
    std::int64_t mask_weight_row_stride, mask_weight_column_stride;
    std::int64_t id_bytes = 0, experts = 0, top_k = 0;
    std::int64_t expert_weight_bytes = 0, expert_mask_bytes = 0, expert_scale_bytes = 0;  // from one expert to the next
    std::int64_t element, element_bytes, weight_format, n_masks, activation, mask_weights;  // as in Variant
};

// The functions that the expressions of sizes call. All divisors are positive.
inline std::int64_t floor_div(std::int64_t a, std::int64_t b) { return a / b - (a % b < 0); }
inline std::int64_t least(std::int64_t a, std::int64_t b) { return a < b ? a : b; }
inline std::int64_t greatest(std::int64_t a, std::int64_t b) { return a > b ? a : b; }

// An integer that is a constant, or a function of the values of a call.
struct Size {
    std::int64_t constant = 0;
    std::int64_t (*of)(const Values&) = nullptr;

    std::int64_t at(const Values& values) const { return of != nullptr ? of(values) : constant; }
};

// A tensor map of the matrix (driver.h) at the address that `pointer` names. Unused maps have an empty `pointer`.
struct Map {
    std::string_view pointer{};
    int item_bytes = 0;
    Size width{}, height{}, pitch{}, box_width{}, box_height{};
    bool swizzle = false;
};

// The fields of a struct of parameters: pointers by name, then 64-bit integers, then 32-bit integers.
struct Struct {
    std::span<const std::string_view> pointers{};
    std::span<const Size> longs{}, ints{};
};

struct Macro {
    std::string_view name;
    Size value;
};

// One launch of a plan.
struct Step {
    const char* kernel;
    std::string_view source;        // the file of csrc/cuda with the kernel
    const unsigned char* code;      // the cubin; null if NVRTC compiles `source` with `macros` at the first launch
    std::span<const Macro> macros;  // empty if there is a cubin
    Size grid_x, grid_y;
    unsigned threads;
    Size shared_bytes;
    bool overlap;  // programmatic dependent launch, as in Geometry
    Struct parameters;
    Struct items{};  // the struct ItemParams of kernels for experts; no fields for other kernels
    int unused_maps;
    std::span<const Map> maps;  // after `unused_maps` maps that the kernel does not read
    std::string_view writes;    // the pointer by which later steps read this step's result; empty for the last step
    Size bytes;                 // the size of this step's result; 0 for the last step
};

// The properties of a call for which kernels are compiled. Element types are numbered as in csrc/cuda/element.cuh.
struct Variant {
    int arch = 0;           // 90 for compute capability 9.0; 0 in plans that serve all variants with their rounds_x
    int element = 0;        // element type of x
    int weight_format = 0;  // code in csrc/cuda/weight_formats.cuh
    bool rounds_x = false;  // x is rounded to fp8_token, in the kernel or before it
    int n_masks = 0;
    int activation = 0;    // code in csrc/cpu/activation.h
    int mask_weights = 0;  // element type of mask_weights; -1 without them

    auto operator<=>(const Variant& other) const = default;
};

// A layer for which a plan is looked up. mglu::experts_down counts as a layer with n_masks 0.
struct Layer {
    Variant variant;
    std::int64_t out_features, in_features;
    std::int64_t experts = 0;  // 0 for a layer without experts
    std::int64_t top_k = 0;    // experts of a token; 0 without experts, and for rows that are sorted by expert
    bool is_packed;            // the weight and the masks are contiguous and start at multiples of 16 bytes
};

// A plan for a layer and for `first_rows` to `last_rows` rows. If out_features is 0, it is for layers of any shape and
// layout. If experts or top_k is negative, the plan is for any value of at least 1.
struct Plan {
    Variant variant{};
    std::int64_t out_features = 0, in_features = 0;
    std::int64_t experts = 0, top_k = 0;
    std::int64_t first_rows = 0, last_rows = 0;
    std::span<const Step> steps{};

    bool is_for_any_shape() const { return out_features == 0; }
};

// Returns the first plan for a call that fits into the shared memory of the device, or null. If no plan takes all rows,
// returns one for the most rows that a plan takes, and sets `values.rows` to this number.
const Plan* find_plan(const Layer& layer, Values& values, const DeviceFacts& device);

// Throws if a call has more experts, or more rows of the result, than the plans take.
void check_experts(std::int64_t experts, std::int64_t rows);

// Maps the names of pointers in structs of parameters to addresses; unknown names get null.
class Addresses {
  public:
    Addresses(std::initializer_list<std::pair<std::string_view, const void*>> entries) : entries_(entries) {}
    const void*& operator[](std::string_view name);

  private:
    std::vector<std::pair<std::string_view, const void*>> entries_;
};

// Launches the steps of a plan. `addresses` has the call's arguments by name, and the result under the name "out".
void run(const Plan& plan, const Values& values, Addresses addresses, const DeviceFacts& device,
         const Executor& executor);

}  // namespace mglu::cuda
