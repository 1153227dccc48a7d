// The operators on torch's tensor handles. They allocate results, and copy tensors whose strides no kernel takes.
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

// The operators over experts. `routing` is expert_ids for experts_forward. With `is_sorted` it is offs, and the
// operator is grouped_forward.
Handle experts_forward(AtenTensorHandle x, AtenTensorHandle weight, AtenTensorHandle packed_masks,
                       AtenTensorHandle routing, bool is_sorted, std::string_view activation,
                       AtenTensorHandle mask_weights, AtenTensorHandle weight_scale, std::string_view weight_format,
                       std::string_view activation_format);
Handle experts_down(AtenTensorHandle y, AtenTensorHandle weight, AtenTensorHandle expert_ids,
                    AtenTensorHandle expert_weights, AtenTensorHandle weight_scale, std::string_view weight_format);

}  // namespace mglu
