// A CUDA driver that launches nothing and prints what it is asked to launch, to be loaded as libcuda.so.1. Its GPU has
// compute capability 9.0 and FAKE_SMS multiprocessors.
#include <cstdio>
#include <cstdlib>

#include "cuda/params.cuh"

extern "C" {

int cuGetErrorString(int, const char** text) {
    *text = "an error of the fake driver";
    return 0;
}

int cuCtxGetDevice(int* device) {
    *device = 0;
    return 0;
}

int cuDeviceGetAttribute(int* value, int attribute, int) {
    switch (attribute) {
        case 16: *value = std::atoi(std::getenv("FAKE_SMS")); return 0;
        case 75: *value = 9; return 0;           // compute capability, major
        case 76: *value = 0; return 0;           // and minor
        case 81: *value = 228 * 1024; return 0;  // shared memory of a multiprocessor
        case 97: *value = 227 * 1024; return 0;  // shared memory that a block may have
        case 111: *value = 1024; return 0;       // shared memory that the driver reserves in a block
        default: return 1;
    }
}

int cuModuleLoadData(void** module, const void* image) {
    *module = const_cast<void*>(image);
    return 0;
}

int cuModuleGetFunction(void** function, void*, const char* name) {
    *function = const_cast<char*>(name);
    return 0;
}

int cuFuncSetAttribute(void*, int, int) { return 0; }

struct Config {
    unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
};

int cuLaunchKernelEx(const Config* config, void* function, void** parameters, void**) {
    const auto& p = *static_cast<const mglu::Params*>(*parameters);
    std::printf("%s %u %u %u %u, weight of %d columns %lld apart%s\n", static_cast<const char*>(function),
                config->grid_x, config->grid_y, config->block_x, config->shared_bytes, p.in_features,
                p.weight_row_stride, p.weight_scale == nullptr ? "" : ", with scales");
    return 0;
}

int cuTensorMapEncodeTiled(void*, int type, unsigned, void*, const unsigned long long* sizes,
                           const unsigned long long* pitches, const unsigned* box, const unsigned*, int, int swizzle,
                           int, int) {
    std::printf("map %d %llu %llu %llu %u %u %d\n", type + 1, sizes[0], sizes[1], pitches[0], box[0], box[1],
                swizzle != 0);
    return 0;
}

}  // extern "C"
