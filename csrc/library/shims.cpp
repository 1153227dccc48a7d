// C functions that packages call directly, without torch's dispatcher and its boxing (mglu_ops/packaging/shim.py).
#include <exception>
#include <iostream>

#include "torch_call.h"

extern "C" {

AOTI_TORCH_EXPORT AOTITorchError aoti_torch_cpu_mglu_forward(AtenTensorHandle x, AtenTensorHandle weight,
                                                             AtenTensorHandle packed_masks, const char* activation,
                                                             AtenTensorHandle* mask_weights,
                                                             AtenTensorHandle* weight_scale, const char* weight_format,
                                                             const char* activation_format, AtenTensorHandle* result) {
    try {
        mglu::Given<AtenTensorHandle> given{x, weight, packed_masks, activation};
        if (mask_weights != nullptr) given.mask_weights = *mask_weights;
        if (weight_scale != nullptr) given.weight_scale = *weight_scale;
        given.weight_format = weight_format;
        given.activation_format = activation_format;
        *result = mglu::forward(given).release();
        return AOTI_TORCH_SUCCESS;
    } catch (const std::exception& error) {
        // The caller's exception names this function but not the reason, so the reason is printed here.
        std::cerr << "mglu::forward: " << error.what() << std::endl;
        return AOTI_TORCH_FAILURE;
    }
}

// Inductor calls one symbol per device. Both symbols run the same code, which asks the tensors for their device.
AOTI_TORCH_EXPORT decltype(aoti_torch_cpu_mglu_forward) aoti_torch_cuda_mglu_forward
    __attribute__((alias("aoti_torch_cpu_mglu_forward")));

}  // extern "C"
