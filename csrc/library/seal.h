// The seal of a package or a weights file of mglu_ops.export. It is the comment at the end of the zip archive, which
// mglu_ops/packaging/seal.py writes.
//
//   mglu_ops seal 8 package torch=2.13 device=cpu weights=inside adler32=5e8fa1c0
//   mglu_ops seal 8 weights adler32=5e8fa1c0
//
// The number is the version of the file's format. The last eight characters are the Adler-32 checksum (RFC 1950) of all
// bytes before them. This code needs no torch, so that it can be tested alone.
#pragma once

#include <istream>
#include <string>

namespace mglu {

struct Seal {
    std::string kind;                    // "package" or "weights"
    std::string torch, device, weights;  // empty for a weights file
};

// Reads the seal of a file. Throws std::runtime_error if the seal is missing or of another version, or if the checksum
// differs.
Seal read_seal(std::istream& file);

}  // namespace mglu
