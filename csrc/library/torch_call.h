// The operators on torch's tensor handles. They allocate results. If no kernel takes the strides of a tensor, they copy
// the tensor.
//
// All throw std::invalid_argument for wrong arguments, and std::runtime_error if torch or a kernel fails.
#pragma once

#include <string_view>

#include "torch_tensor.h"

namespace mglu {

Handle pack_masks(AtenTensorHandle masks);
Handle pack_logits(AtenTensorHandle mask_logits);  // packs `mask_logits > 0`
Handle unpack_masks(AtenTensorHandle packed_masks, std::int64_t in_features);

// `mask_weights` and `weight_scale` may be null.
Handle forward(AtenTensorHandle x, AtenTensorHandle weight, AtenTensorHandle packed_masks, std::string_view activation,
               AtenTensorHandle mask_weights, AtenTensorHandle weight_scale, std::string_view weight_format,
               std::string_view activation_format);

// The operators over experts. With `is_sorted` the operator is grouped_forward, and `routing` is offs. Otherwise the
// operator is experts_forward, and `routing` is expert_ids.
Handle experts_forward(AtenTensorHandle x, AtenTensorHandle weight, AtenTensorHandle packed_masks,
                       AtenTensorHandle routing, bool is_sorted, std::string_view activation,
                       AtenTensorHandle mask_weights, AtenTensorHandle weight_scale, std::string_view weight_format,
                       std::string_view activation_format);
Handle experts_down(AtenTensorHandle y, AtenTensorHandle weight, AtenTensorHandle expert_ids,
                    AtenTensorHandle expert_weights, AtenTensorHandle weight_scale, std::string_view weight_format);

}  // namespace mglu
