// The public interface of libmglu_ops.so, in C.
//
// Linked or loaded, the library registers torch.ops.mglu.* with torch, so that a package of `mglu_ops.export` runs; there
// is nothing to call for that. Where Python's mglu_ops has registered them, it leaves them.
#pragma once

#define MGLU_OPS_VERSION "0.1.0"  // as mglu_ops.__version__

#ifdef __cplusplus
extern "C" {
#endif

// Null if the file is a whole package of mglu_ops.export, made for this version of torch ("2.13.1") and this device
// ("cpu", or "cuda"); either may be null, not to ask. Else what is wrong, in words, valid until the thread's next call.
//
// To be called before torch's loader, which maps the machine code of what it is given without a look at its checksum.
__attribute__((visibility("default"))) const char* mglu_check_package(const char* path, const char* torch_version,
                                                                        const char* device);

// The version of mglu_ops that the library was built from.
__attribute__((visibility("default"))) const char* mglu_version(void);

#ifdef __cplusplus
}
#endif
