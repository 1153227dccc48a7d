// The seal at the end of a package or a weights file of mglu_ops.export: the comment of the zip archive, written by
// mglu_ops/packaging/seal.py.
//
//   mglu_ops seal 7 package torch=2.13 device=cpu weights=inside adler32=5e8fa1c0
//   mglu_ops seal 7 weights adler32=5e8fa1c0
//
// The number is the format of the file. The last eight characters are the Adler-32 checksum (RFC 1950) of all bytes
// before them. The code needs no other library, so that it can be tested alone.
#pragma once

#include <istream>
#include <string>

namespace mglu {

struct Seal {
    std::string kind;                    // "package" or "weights"
    std::string torch, device, weights;  // of a package, else empty
};

// Reads the seal of a file. Throws std::runtime_error if the seal is missing or has another format, or if the file is
// damaged.
Seal read_seal(std::istream& file);

}  // namespace mglu
