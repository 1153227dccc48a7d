// Checks a file before torch's loader gets it: packages of mglu_ops.export, and their files of weights. It needs no other
// library, so that it can be tested alone.
//
// The seal of a package is the comment of the zip archive, which are its last bytes (mglu_ops/packaging/package.py,
// `seal`):
//
//   mglu_ops seal 1 torch=2.13.1 device=cpu adler32=5e8fa1c0
//
// Its last eight characters are the checksum (RFC 1950) of every byte before them.
#pragma once

#include <string_view>

namespace mglu {

// Throws FileProblem unless `package`, the bytes of a file, is a whole package with a right archive and description, made
// for this version of torch and this device (empty: any). Returns whether it holds its weights.
bool check_package(std::string_view package, std::string_view torch_version, std::string_view device);

// Throws FileProblem unless `archive`, the bytes of a file, is a whole file of torch.save, and no member is compressed.
void check_weights(std::string_view archive);

}  // namespace mglu
