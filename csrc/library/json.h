// JSON from a file that anyone may have written, read strictly: the same as `parse` of mglu_ops/packaging/description.py.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace mglu {

struct Json {
    enum class Kind { null, boolean, integer, other_number, text, list, object };

    Kind kind = Kind::null;
    bool boolean = false;
    std::int64_t integer = 0;
    std::string text;  // UTF-8, in which halves of surrogate pairs are encoded as other code points are
    std::vector<Json> items;
    std::vector<std::pair<std::string, Json>> entries;

    // The value of an entry of an object, or null.
    const Json* find(std::string_view name) const;
};

// Throws FileProblem if `text`, which the message calls `what`, is not valid JSON in UTF-8, is nested too deep, or has an
// object with a name twice.
Json parse_json(std::string_view text, const std::string& what);

}  // namespace mglu
