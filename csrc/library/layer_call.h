// The operators on torch's handles: results are allocated, layouts that no kernel takes are copied.
#pragma once

#include <string_view>

#include "torch_tensor.h"

namespace mglu {

Handle pack_masks(AtenTensorHandle masks);
Handle pack_logits(AtenTensorHandle mask_logits);  // of `mask_logits > 0`
Handle unpack_masks(AtenTensorHandle packed_masks, std::int64_t in_features);
Handle forward(AtenTensorHandle x, AtenTensorHandle weight, AtenTensorHandle packed_masks, std::string_view activation,
               AtenTensorHandle route_weights);  // route_weights may be null

}  // namespace mglu
