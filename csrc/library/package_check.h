// Checks that a file is a whole package of mglu_ops.export, by the seal at its end. It needs no other library, so that it
// can be tested alone.
//
// The seal is the comment of the zip archive, which are its last bytes (mglu_ops/packaging/package.py, `seal`):
//
//   mglu_ops seal 1 torch=2.13.1 device=cpu adler32=5e8fa1c0
//
// Its last eight characters are the checksum (RFC 1950) of every byte before them.
#pragma once

#include <string>
#include <string_view>

namespace mglu {

// Empty if `package`, the bytes of a file, is whole and for this version of torch and this device (empty: any). Otherwise
// a sentence that says what is wrong.
std::string package_problem(std::string_view package, std::string_view torch_version, std::string_view device);

// The same for a file.
std::string package_file_problem(const char* path, std::string_view torch_version, std::string_view device);

}  // namespace mglu
