#include "package_description.h"

#include <functional>
#include <set>

#include "json.h"

namespace mglu {

namespace {

constexpr std::int64_t kFormat = 3, kMostMasks = 16;
constexpr std::size_t kMostTextBytes = 1 << 22;
const std::string kDescription = "its description";

std::string describe(const Json& value) {
    switch (value.kind) {
        case Json::Kind::null: return "null";
        case Json::Kind::boolean: return value.boolean ? "true" : "false";
        case Json::Kind::integer: return std::to_string(value.integer);
        case Json::Kind::other_number: return "a number that is no 64-bit integer";
        case Json::Kind::text: return quoted(value.text);
        case Json::Kind::list: return "a list";
        case Json::Kind::object: return "an object";
    }
    return {};
}

[[noreturn]] void refuse(const std::string& field, const Json& value, const std::string& must_be) {
    throw FileProblem(field + ": got " + describe(value) + ", must be " + must_be);
}

// A rule throws FileProblem with the name of the field if the value breaks it.
using Rule = std::function<void(const std::string& field, const Json& value)>;
using Rules = std::vector<std::pair<std::string, Rule>>;

// Text without control characters and without halves of surrogate pairs, so that it can be printed.
void text(const std::string& field, const Json& value) {
    bool is_good = value.kind == Json::Kind::text;
    for (std::size_t i = 0; is_good && i < value.text.size(); ++i) {
        const auto byte = static_cast<unsigned char>(value.text[i]);
        const bool is_surrogate = byte == 0xED && static_cast<unsigned char>(value.text[i + 1]) >= 0xA0;
        is_good = byte >= 0x20 && byte != 0x7F && !is_surrogate;
    }
    if (!is_good) refuse(field, value, "printable text");
}

void any_text(const std::string& field, const Json& value) {
    if (value.kind != Json::Kind::text) refuse(field, value, "text");
}

void boolean(const std::string& field, const Json& value) {
    if (value.kind != Json::Kind::boolean) refuse(field, value, "true or false");
}

void size(const std::string& field, const Json& value) {
    if (value.kind != Json::Kind::integer || value.integer < 0) refuse(field, value, "an integer of at least 0");
}

Rule integer(std::int64_t low, std::int64_t high) {
    return [=](const std::string& field, const Json& value) {
        if (value.kind != Json::Kind::integer || value.integer < low || value.integer > high)
            refuse(field, value, "an integer from " + std::to_string(low) + " to " + std::to_string(high));
    };
}

Rule equal(std::int64_t wanted, const std::string& otherwise) {
    return [=](const std::string& field, const Json& value) {
        if (value.kind != Json::Kind::integer || value.integer != wanted)
            refuse(field, value, std::to_string(wanted) + "; " + otherwise);
    };
}

Rule one_of(const std::vector<std::string>& allowed) {
    return [=](const std::string& field, const Json& value) {
        std::string all;
        for (const std::string& word : allowed) {
            if (value.kind == Json::Kind::text && value.text == word) return;
            all += (all.empty() ? "" : ", ") + word;
        }
        refuse(field, value, "one of " + all);
    };
}

Rule optional(const Rule& rule) {
    return [=](const std::string& field, const Json& value) {
        if (value.kind != Json::Kind::null) rule(field, value);
    };
}

Rule list_of(const Rule& rule) {
    return [=](const std::string& field, const Json& value) {
        if (value.kind != Json::Kind::list) refuse(field, value, "a list");
        for (std::size_t i = 0; i < value.items.size(); ++i) rule(field + "[" + std::to_string(i) + "]", value.items[i]);
    };
}

// A list with one item for each rule.
Rule items(const std::vector<Rule>& rules) {
    return [=](const std::string& field, const Json& value) {
        if (value.kind != Json::Kind::list || value.items.size() != rules.size())
            refuse(field, value, "a list of " + std::to_string(rules.size()));
        for (std::size_t i = 0; i < rules.size(); ++i) rules[i](field + "[" + std::to_string(i) + "]", value.items[i]);
    };
}

// An object that has the entries of the rules and no other. `joint` joins its field and the name of an entry.
Rule entries(const Rules& rules, const std::string& joint = ".") {
    return [=](const std::string& field, const Json& value) {
        if (value.kind != Json::Kind::object) refuse(field, value, "an object");
        std::set<std::string_view> known;
        for (const auto& [name, rule] : rules) {
            const Json* entry = value.find(name);
            if (entry == nullptr) throw FileProblem(field + joint + name + ": is missing");
            rule(field + joint + name, *entry);
            known.insert(name);
        }
        for (const auto& [name, entry] : value.entries)
            if (known.count(name) == 0)
                throw FileProblem(field + ": " + quoted(name) + " is unknown to this version of mglu_ops");
    };
}

// An object with any entries, each of which follows the rule.
Rule object_of(const Rule& rule) {
    return [=](const std::string& field, const Json& value) {
        if (value.kind != Json::Kind::object) refuse(field, value, "an object");
        for (const auto& [name, entry] : value.entries) rule(field + ": " + quoted(name), entry);
    };
}

void size_or_range(const std::string& field, const Json& value) {
    (value.kind == Json::Kind::list ? items({size, optional(size), text}) : Rule(size))(field, value);
}

const Rule& description_rule() {
    static const std::vector<std::string> activations = {
#define MGLU_ACTIVATION(name, ...) #name,
#include "../cpu/activation.h"
    };
    static const Rule floating = one_of({"float16", "bfloat16", "float32", "float64"});
    static const Rule input = entries({
        {"name", text},
        {"dtype", text},
        {"shape", list_of(size_or_range)},
        {"order", list_of(size)},
        {"is_written", boolean},
        {"constant", optional(text)},
    });
    static const Rule layer = entries({
        {"n_masks", integer(1, kMostMasks)},
        {"out_features", size},
        {"in_features", size},
        {"dtype", floating},
        {"activation", one_of(activations)},
        {"route_dtype", optional(floating)},
    });
    static const Rule weight =
        entries({{"name", text}, {"dtype", text}, {"shape", list_of(size)}, {"strides", list_of(size)}});
    static const Rule rule = entries(
        {
            {"format", equal(kFormat, "export the model anew")},  // first, because another format has other entries
            {"torch", text},
            {"mglu_ops", text},
            {"device", one_of({"cpu", "cuda"})},
            {"backend", one_of({"cpu", "cuda", "triton", "composite"})},
            {"calls", one_of({"operator", "shim", "nothing"})},
            {"embeds_weights", boolean},
            {"inputs", list_of(input)},
            {"layers", list_of(layer)},
            {"weights", list_of(weight)},
            {"conditions", list_of(text)},
            {"cpu", optional(items({text, text}))},
            {"arch", optional(items({size, size}))},
            {"multi_arch", boolean},
            {"missed", list_of(text)},
        },
        ": ");
    return rule;
}

void require_equal(const std::string& name, const Json& stated, std::string_view in_seal) {
    if (stated.text != in_seal)
        throw FileProblem(kDescription + ": " + name + ": got " + quoted(stated.text) + ", must be " + quoted(in_seal) +
                          ", as in the seal");
}

}  // namespace

bool check_description(const std::vector<Member>& members, std::string_view torch_version, std::string_view device) {
    constexpr std::string_view kTexts = "_metadata.json";
    std::set<std::string> described;
    for (const Member& member : members) {
        if (member.name.size() < kTexts.size() || member.name.substr(member.name.size() - kTexts.size()) != kTexts)
            continue;
        const std::string what = "member " + quoted(member.name);
        if (member.bytes.size() > kMostTextBytes)
            throw FileProblem(what + " has " + std::to_string(member.bytes.size()) + " bytes, must have at most " +
                              std::to_string(kMostTextBytes));
        const Json texts = parse_json(member.bytes, what);
        object_of(any_text)(what, texts);
        if (const Json* found = texts.find("mglu_ops")) described.insert(found->text);
    }
    if (described.size() != 1)
        throw FileProblem(described.empty() ? "it lacks its description" : "it holds two different descriptions");
    const Json values = parse_json(*described.begin(), kDescription);
    description_rule()(kDescription, values);
    if (values.find("device")->text == "cuda" && values.find("arch")->kind == Json::Kind::null)
        throw FileProblem(kDescription + ": arch: got null, must be a list of 2 for the device cuda");
    require_equal("torch", *values.find("torch"), torch_version);
    require_equal("device", *values.find("device"), device);
    return values.find("embeds_weights")->boolean;
}

}  // namespace mglu
