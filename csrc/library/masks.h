// Runs mglu::pack_masks and mglu::unpack_masks on plain tensors, on the CPU.
//
// The packed format is uint8 [out_features, ceil(in_features / 8), n_masks]: bit k % 8 of byte [r, k / 8, i] is M_i[r,
// k]. The functions `check_...` throw std::invalid_argument for arguments that no kernel could take. The functions that
// pack and unpack throw std::runtime_error if a kernel fails. The caller allocates `out`, which is contiguous.
#pragma once

#include <vector>

#include "executor.h"
#include "tensor.h"

namespace mglu {

// masks is [n_masks, out_features, in_features] or [out_features, in_features] with any strides. Its dtype is bool, or
// an integer or floating dtype with the values 0 and 1.
void check_masks(const Tensor& masks);
std::vector<std::int64_t> packed_sizes(const Tensor& masks);
void pack_masks(const Tensor& masks, const Tensor& out, const Executor& executor);

// out is bool [n_masks, out_features, in_features].
void check_packed(const Tensor& packed_masks, std::int64_t in_features);
void unpack_masks(const Tensor& packed_masks, std::int64_t in_features, const Tensor& out, const Executor& executor);

}  // namespace mglu
