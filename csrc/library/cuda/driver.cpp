#include "driver.h"

#include <dlfcn.h>

#include <map>
#include <mutex>
#include <stdexcept>

namespace mglu::cuda {

namespace {

// Copies of CUlaunchAttribute, CUlaunchConfig and some enumerators, so that libmglu_ops.so builds without cuda.h. They
// are part of the driver's binary interface and do not change.
struct LaunchAttribute {
    int id;
    int pad;
    int value;
    char rest[60];
};
struct LaunchConfig {
    unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
    void* stream;
    LaunchAttribute* attributes;
    unsigned n_attributes;
};
constexpr int kProgrammaticStreamSerialization = 6, kMaxDynamicSharedSize = 8;
constexpr int kMultiprocessorCount = 16, kComputeCapabilityMajor = 75, kComputeCapabilityMinor = 76;
constexpr int kMaxSharedMemoryPerMultiprocessor = 81, kMaxSharedMemoryPerBlockOptin = 97;
constexpr int kUint8 = 0, kUint16 = 1, kNoSwizzle = 0, kSwizzle32B = 1, kSwizzle64B = 2, kSwizzle128B = 3,
              kPromote64B = 1;
constexpr unsigned kSharedBytesByDefault = 48 * 1024;

class Library {
  public:
    explicit Library(std::initializer_list<const char*> names) {
        for (const char* name : names)
            if (handle_ == nullptr) handle_ = dlopen(name, RTLD_NOW | RTLD_LOCAL);
        if (handle_ == nullptr)
            throw std::runtime_error(std::string("mglu: ") + *names.begin() + " cannot be opened: " + dlerror());
    }
    template <typename Pointer>
    void find(Pointer& pointer, const char* name) const {
        pointer = reinterpret_cast<Pointer>(dlsym(handle_, name));
        if (pointer == nullptr) throw std::runtime_error(std::string("mglu: CUDA lacks ") + name);
    }

  private:
    void* handle_ = nullptr;  // never closed, because the static Driver and Nvrtc point to its functions
};

struct Driver {
    int (*error_string)(int, const char**);
    int (*current_device)(int*);
    int (*attribute)(int*, int, int);
    int (*load_module)(void**, const void*);
    int (*get_function)(void**, void*, const char*);
    int (*set_attribute)(void*, int, int);
    int (*launch)(const LaunchConfig*, void*, void**, void**);
    int (*encode)(void*, int, std::uint32_t, void*, const std::uint64_t*, const std::uint64_t*, const std::uint32_t*,
                  const std::uint32_t*, int, int, int, int);

    Driver() {
        const Library library{"libcuda.so.1"};
        library.find(error_string, "cuGetErrorString");
        library.find(current_device, "cuCtxGetDevice");
        library.find(attribute, "cuDeviceGetAttribute");
        library.find(load_module, "cuModuleLoadData");
        library.find(get_function, "cuModuleGetFunction");
        library.find(set_attribute, "cuFuncSetAttribute");
        library.find(launch, "cuLaunchKernelEx");
        library.find(encode, "cuTensorMapEncodeTiled");
    }
    void check(int error, const char* what) const {
        if (error == 0) return;
        const char* words = nullptr;
        error_string(error, &words);
        throw std::runtime_error(std::string("mglu: ") + what + ": CUDA error " + std::to_string(error) + " (" +
                                 (words != nullptr ? words : "unknown") + ")");
    }
};

const Driver& driver() {
    static const Driver opened;
    return opened;
}

struct Nvrtc {
    int (*create)(void**, const char*, const char*, int, const char* const*, const char* const*);
    int (*compile)(void*, int, const char* const*);
    int (*cubin_size)(void*, std::size_t*);
    int (*cubin)(void*, char*);
    int (*log_size)(void*, std::size_t*);
    int (*log)(void*, char*);
    int (*destroy)(void**);

    Nvrtc() {
        const Library library{"libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12"};
        library.find(create, "nvrtcCreateProgram");
        library.find(compile, "nvrtcCompileProgram");
        library.find(cubin_size, "nvrtcGetCUBINSize");
        library.find(cubin, "nvrtcGetCUBIN");
        library.find(log_size, "nvrtcGetProgramLogSize");
        library.find(log, "nvrtcGetProgramLog");
        library.find(destroy, "nvrtcDestroyProgram");
    }
};

}  // namespace

const DeviceFacts& current_device() {
    const Driver& cuda = driver();
    int device = 0;
    cuda.check(cuda.current_device(&device), "the current device");
    static std::mutex mutex;
    static auto* known = new std::map<int, DeviceFacts>;  // std::map, since its entries never move
    const std::lock_guard lock(mutex);
    const auto found = known->find(device);
    if (found != known->end()) return found->second;
    const auto ask = [&](int attribute) {
        int value = 0;
        cuda.check(cuda.attribute(&value, attribute, device), "an attribute of the device");
        return value;
    };
    const int arch = 10 * ask(kComputeCapabilityMajor) + ask(kComputeCapabilityMinor);
    const DeviceFacts facts{device, arch, ask(kMultiprocessorCount), ask(kMaxSharedMemoryPerMultiprocessor),
                            ask(kMaxSharedMemoryPerBlockOptin)};
    return known->emplace(device, facts).first->second;
}

Function load(const void* cubin, const char* kernel) {
    const Driver& cuda = driver();
    void *module = nullptr, *function = nullptr;
    cuda.check(cuda.load_module(&module, cubin), kernel);
    cuda.check(cuda.get_function(&function, module, kernel), kernel);
    return function;
}

void allow_shared(Function function, unsigned shared_bytes, const char* kernel) {
    if (shared_bytes <= kSharedBytesByDefault) return;
    const Driver& cuda = driver();
    cuda.check(cuda.set_attribute(function, kMaxDynamicSharedSize, static_cast<int>(shared_bytes)), kernel);
}

void launch(Function function, const Geometry& geometry, void* stream, void* parameters, void* items) {
    const Driver& cuda = driver();
    LaunchAttribute overlap{kProgrammaticStreamSerialization, 0, 1, {}};
    const LaunchConfig config{geometry.grid_x,       geometry.grid_y, 1,        geometry.threads,          1, 1,
                              geometry.shared_bytes, stream,          &overlap, geometry.overlap ? 1u : 0u};
    void* arguments[] = {parameters, items};
    cuda.check(cuda.launch(&config, function, arguments, nullptr), "launching a kernel");
}

TensorMap encode(const Matrix& matrix, const void* pointer) {
    const Driver& cuda = driver();
    TensorMap map;
    const std::uint64_t sizes[] = {matrix.width, matrix.height}, pitches[] = {matrix.pitch};
    const std::uint32_t box[] = {matrix.box_width, matrix.box_height}, steps[] = {1, 1};
    const std::uint32_t row_bytes = matrix.box_width * matrix.item_bytes;
    const int swizzle = row_bytes == 32 ? kSwizzle32B : row_bytes == 64 ? kSwizzle64B : kSwizzle128B;
    cuda.check(cuda.encode(map.opaque, matrix.item_bytes == 1 ? kUint8 : kUint16, 2, const_cast<void*>(pointer), sizes,
                           pitches, box, steps, 0, matrix.swizzle ? swizzle : kNoSwizzle, kPromote64B, 0),
               "encoding a tensor map");
    return map;
}

std::vector<char> compile(const std::vector<Source>& sources, int arch, const std::vector<std::string>& options) {
    static const Nvrtc nvrtc;
    std::vector<const char*> names, texts, words;
    for (std::size_t i = 1; i < sources.size(); ++i) {
        names.push_back(sources[i].name);
        texts.push_back(sources[i].text);
    }
    const std::string target = "-arch=sm_" + std::to_string(arch);
    words = {target.c_str(), "-std=c++17"};
    for (const std::string& option : options) words.push_back(option.c_str());
    void* program = nullptr;
    const auto count = static_cast<int>(names.size());
    if (nvrtc.create(&program, sources[0].text, sources[0].name, count, texts.data(), names.data()) != 0)
        throw std::runtime_error("mglu: NVRTC cannot be used");
    const int error = nvrtc.compile(program, static_cast<int>(words.size()), words.data());
    std::size_t size = 0;
    std::vector<char> bytes;
    if (error == 0) {
        nvrtc.cubin_size(program, &size);
        bytes.resize(size);
        nvrtc.cubin(program, bytes.data());
    } else {
        nvrtc.log_size(program, &size);
        bytes.resize(size + 1);
        nvrtc.log(program, bytes.data());
    }
    nvrtc.destroy(&program);
    if (error != 0)
        throw std::runtime_error("mglu: NVRTC refused " + std::string(sources[0].name) + ":\n" + bytes.data());
    return bytes;
}

}  // namespace mglu::cuda
