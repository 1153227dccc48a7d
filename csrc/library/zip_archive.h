// The zip archives of torch, read strictly, so that every other reader of such a file finds the same members: the same as
// mglu_ops/packaging/archive.py, which says why, with the same words.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace mglu {

// What is wrong with a file, in words that are to follow its path.
struct FileProblem : std::runtime_error {
    using std::runtime_error::runtime_error;
};

struct Member {
    std::string_view name;
    std::string_view bytes;
    std::uint32_t crc32;
};

// The members of the archive in the order in which they are stored; they point into it. Throws FileProblem if it is no
// archive, is damaged, or holds what torch's writer does not write.
std::vector<Member> read_members(std::string_view archive);

// The checksum of a member's bytes, as the archive stores it.
std::uint32_t crc32(std::string_view bytes);

// Text of a damaged or hostile file as printable ASCII between quotes, at most 100 bytes of it.
std::string quoted(std::string_view text);

}  // namespace mglu
