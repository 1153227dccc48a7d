// Is a file a whole package? Of no library, so that it can be tested alone.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace mglu {

// Empty, or what is wrong with a package of `size` bytes for a version of torch and a device (empty: any).
std::string package_problem(const unsigned char* data, std::size_t size, std::string_view torch_version,
                            std::string_view device);

// Of a file.
std::string package_file_problem(const char* path, std::string_view torch_version, std::string_view device);

}  // namespace mglu
