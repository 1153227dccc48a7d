// The operators on torch's tensor handles. They allocate their results, and copy tensors whose strides no kernel takes.
//
// They throw std::invalid_argument for wrong arguments, and std::runtime_error if torch or a kernel fails.
#pragma once

#include <optional>
#include <string_view>

#include "layer_call.h"
#include "torch_tensor.h"

namespace mglu {

Handle pack_masks(AtenTensorHandle masks);
Handle pack_logits(AtenTensorHandle mask_logits);  // packs `mask_logits > 0`
Handle unpack_masks(AtenTensorHandle packed_masks, std::int64_t in_features);

Handle forward(const Given<AtenTensorHandle>& given);  // runs experts_forward and grouped_forward too
Handle experts_down(AtenTensorHandle y, AtenTensorHandle weight, AtenTensorHandle expert_ids,
                    AtenTensorHandle expert_weights, const std::optional<AtenTensorHandle>& weight_scale,
                    std::string_view weight_format);

}  // namespace mglu
