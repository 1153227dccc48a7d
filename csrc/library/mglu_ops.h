// The public interface of libmglu_ops.so, in C.
//
// A program that links or loads the library can run packages of `mglu_ops.export`: the library registers
// torch.ops.mglu.* when it is loaded, unless Python's mglu_ops has done so in the same process.
#pragma once

#define MGLU_OPS_VERSION "0.1.0"  // equals mglu_ops.__version__

#ifdef __cplusplus
extern "C" {
#endif

// Checks the files of a model before torch's loader gets them, because the loader compares no checksums, and a package
// that lacks its weights crashes when it runs.
//
// Returns null if `package` is a whole package of mglu_ops.export, made for this version of torch ("2.13.1") and this
// device ("cpu" or "cuda"); null in place of either accepts any. `weights` is the weights file that the program will
// give to the package, which must also be whole, or null if there is none: packages of export(..., weights=FILE) need
// one, and other packages refuse it. Otherwise returns a message that says what is wrong. It is valid until the
// thread's next call.
//
// A package is code: run only packages that you trust. The check finds damage and mistakes, but cannot find malice.
__attribute__((visibility("default"))) const char* mglu_check_model(const char* package, const char* weights,
                                                                    const char* torch_version, const char* device);

// The version of mglu_ops from which the library was built.
__attribute__((visibility("default"))) const char* mglu_version(void);

#ifdef __cplusplus
}
#endif
