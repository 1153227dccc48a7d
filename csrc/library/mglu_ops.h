// The public interface of libmglu_ops.so, in C.
//
// A program that links or loads the library can run packages of `mglu_ops.export`: the library registers
// torch.ops.mglu.* with torch by itself, unless Python's mglu_ops has done so in the same process.
#pragma once

#define MGLU_OPS_VERSION "0.1.0"  // equals mglu_ops.__version__

#ifdef __cplusplus
extern "C" {
#endif

// Checks a package before torch's loader extracts it and maps the machine code in it: the loader compares no checksums,
// and writes where the names in the archive say.
//
// Returns null if the file is a whole package of mglu_ops.export, made for this version of torch ("2.13.1") and this
// device ("cpu" or "cuda"); null in place of either accepts any. Otherwise returns a message that says what is wrong; it
// is valid until the thread's next call of a function of this header.
//
// A package of export(..., weights=FILE) passes, although it holds no weights, and crashes if it runs before it was given
// them; mglu_check_model checks that too.
//
// A package is code, and is to be trusted as such: the check finds damage and mistakes, and cannot find malice.
__attribute__((visibility("default"))) const char* mglu_check_package(const char* path, const char* torch_version,
                                                                        const char* device);

// Checks all files of a model: the package, as mglu_check_package does, and the file of weights that the program will give
// it, as mglu_check_weights does. `weights` is null if the program gives it none; then a package that needs weights is
// refused, and in the other case a package that has its own.
__attribute__((visibility("default"))) const char* mglu_check_model(const char* path, const char* weights,
                                                                      const char* torch_version, const char* device);

// Checks a file of weights before torch reads it, in the same way: it must be a whole file of torch.save, and no member may
// be compressed.
__attribute__((visibility("default"))) const char* mglu_check_weights(const char* path);

// The version of mglu_ops from which the library was built.
__attribute__((visibility("default"))) const char* mglu_version(void);

#ifdef __cplusplus
}
#endif
