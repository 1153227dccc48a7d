// The public interface of libmglu_ops.so, in C.
//
// A program that links or loads the library can run packages of `mglu_ops.export`, because the library registers
// torch.ops.mglu.* when it is loaded. The library does not register them if Python's mglu_ops has done so in the same
// process.
#pragma once

#define MGLU_OPS_VERSION "0.1.0"  // equals mglu_ops.__version__

#ifdef __cplusplus
extern "C" {
#endif

// Checks the files of a model before torch's loader opens them. The loader compares no checksums, and a package that
// lacks its weights crashes when it runs.
//
// Returns null if the files are complete and fit together, else a message that says what is wrong. The message is valid
// until the same thread calls this function again.
//
// - package: the path of a package of mglu_ops.export.
// - weights: the path of the weights file that the program will give to the package, or null for none. Packages of
//   export(..., weights=FILE) need one. For other packages it must be null.
// - torch_version: the version of torch that the package must have been made for, such as "2.13.1"; null accepts any.
// - device: the device that the package must have been made for, "cpu" or "cuda"; null accepts both.
//
// A package is code: run only packages that you trust. The check finds damage and mistakes, not malice.
__attribute__((visibility("default"))) const char* mglu_check_model(const char* package, const char* weights,
                                                                    const char* torch_version, const char* device);

// The version of mglu_ops from which the library was built.
__attribute__((visibility("default"))) const char* mglu_version(void);

#ifdef __cplusplus
}
#endif
