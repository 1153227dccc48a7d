// A fake CUDA driver, loaded as libcuda.so.1, which prints launches and runs no kernel. Its GPU has compute capability
// 9.0 and as many multiprocessors as the environment variable FAKE_SMS says. The same file is a fake NVRTC, which
// prints what it should compile.
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "cuda/params.cuh"

namespace {

void print(const void* bytes, std::size_t size) {
    for (std::size_t i = 0; i < size; ++i) std::printf("%02x", static_cast<const unsigned char*>(bytes)[i]);
}

// Prints the fields of the struct that a kernel takes, without the gaps between and after them.
void print_fields(std::string_view kernel, const void* bytes) {
    if (kernel == "mglu_group_tokens") return print(bytes, offsetof(mglu::GroupParams, max_items) + 4);
    if (kernel == "mglu_experts_down") return print(bytes, offsetof(mglu::DownParams, in_features) + 4);
    if (kernel == "mglu_combine_experts") return print(bytes, offsetof(mglu::CombineParams, out_features) + 4);
    print(bytes, sizeof(mglu::Params));
    if (kernel == "mglu_tile_wgmma")
        print(&static_cast<const mglu::TileParams*>(bytes)->x_map, 3 * sizeof(mglu::TensorMap));
}

}  // namespace

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
        case 75: *value = 9; return 0;           // major compute capability
        case 76: *value = 0; return 0;           // minor compute capability
        case 81: *value = 228 * 1024; return 0;  // shared memory of a multiprocessor
        case 97: *value = 227 * 1024; return 0;  // the most shared memory of a block
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
    void *stream, *attributes;
    unsigned n_attributes;
};

int cuLaunchKernelEx(const Config* config, void* function, void** parameters, void**) {
    const auto* kernel = static_cast<const char*>(function);
    std::printf("%s %u %u %u %u %u ", kernel, config->grid_x, config->grid_y, config->block_x, config->shared_bytes,
                config->n_attributes);
    print_fields(kernel, parameters[0]);
    if (parameters[1] != nullptr) print(parameters[1], sizeof(mglu::ItemParams));
    std::printf("\n");
    return 0;
}

int cuTensorMapEncodeTiled(mglu::u64* map, int type, unsigned, void* pointer, const mglu::u64* sizes,
                           const mglu::u64* pitches, const unsigned* box, const unsigned*, int, int swizzle, int, int) {
    const mglu::u64 fields[] = {static_cast<mglu::u64>(type),
                                reinterpret_cast<mglu::u64>(pointer),
                                sizes[0],
                                sizes[1],
                                pitches[0],
                                box[0],
                                box[1],
                                static_cast<mglu::u64>(swizzle)};
    for (int i = 0; i < 16; ++i) map[i] = i < 8 ? fields[i] : 0;
    return 0;
}

int nvrtcCreateProgram(void** program, const char*, const char* name, int, const char* const*, const char* const*) {
    *program = const_cast<char*>(name);
    return 0;
}

int nvrtcCompileProgram(void* program, int count, const char* const* options) {
    std::printf("compile %s", static_cast<const char*>(program));
    for (int i = 0; i < count; ++i) std::printf(" %s", options[i]);
    std::printf("\n");
    return 0;
}

int nvrtcGetCUBINSize(void*, std::size_t* size) { return *size = 1, 0; }
int nvrtcGetCUBIN(void*, char*) { return 0; }
int nvrtcGetProgramLogSize(void*, std::size_t*) { return 0; }
int nvrtcGetProgramLog(void*, char*) { return 0; }
int nvrtcDestroyProgram(void**) { return 0; }

}  // extern "C"
