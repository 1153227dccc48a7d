// The description that a package holds of itself (PackageInfo of mglu_ops/packaging/package.py, which checks the same with
// the same words).
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "zip_archive.h"

namespace mglu {

// Throws FileProblem, which names the field, unless the members hold one description that is right and agrees with the
// version of torch and the device of the seal. Returns whether the package holds its weights.
bool check_description(const std::vector<Member>& members, std::string_view torch_version, std::string_view device);

}  // namespace mglu
