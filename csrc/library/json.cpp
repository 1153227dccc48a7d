#include "json.h"

#include <charconv>
#include <optional>
#include <unordered_set>

#include "zip_archive.h"

namespace mglu {

namespace {

constexpr int kDeepest = 8;

// Whether a text is UTF-8 without overlong forms and surrogates.
bool is_utf8(std::string_view text) {
    for (std::size_t i = 0; i < text.size();) {
        const auto byte = [&](std::size_t at) -> std::uint32_t {
            return at < text.size() ? static_cast<unsigned char>(text[at]) : 0;
        };
        const std::uint32_t first = byte(i);
        const std::size_t more = first < 0x80 ? 0 : first >> 5 == 6 ? 1 : first >> 4 == 14 ? 2 : first >> 3 == 30 ? 3 : 4;
        if (more == 4) return false;
        std::uint32_t point = more == 0 ? first : first & (0x3F >> more);
        for (std::size_t k = 1; k <= more; ++k) {
            if (byte(i + k) >> 6 != 2) return false;
            point = point << 6 | (byte(i + k) & 0x3F);
        }
        constexpr std::uint32_t kSmallest[] = {0, 0x80, 0x800, 0x10000};
        if (point < kSmallest[more] || point > 0x10FFFF || (point >= 0xD800 && point < 0xE000)) return false;
        i += 1 + more;
    }
    return true;
}

void append_utf8(std::string& text, std::uint32_t point) {
    const auto add = [&](std::uint32_t byte) { text += static_cast<char>(byte); };
    if (point < 0x80) return add(point);
    if (point < 0x800) return add(0xC0 | point >> 6), add(0x80 | (point & 0x3F));
    if (point < 0x10000) add(0xE0 | point >> 12);
    else add(0xF0 | point >> 18), add(0x80 | (point >> 12 & 0x3F));
    add(0x80 | (point >> 6 & 0x3F)), add(0x80 | (point & 0x3F));
}

class Parser {
  public:
    Parser(std::string_view text, const std::string& what) : text_(text), what_(what) {}

    Json document() {
        Json value = parse_value(0);
        skip_space();
        if (at_ != text_.size()) fail();
        if (twice_) throw FileProblem(what_ + ": " + quoted(*twice_) + " is there twice");
        return value;
    }

  private:
    [[noreturn]] void fail() const {
        throw FileProblem(what_ + " is not valid JSON, or is nested more than " + std::to_string(kDeepest) + " deep");
    }
    char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }
    bool take(std::string_view word) {
        if (text_.substr(at_, word.size()) != word) return false;
        at_ += word.size();
        return true;
    }
    void skip_space() {
        while (at_ < text_.size() && std::string_view(" \t\n\r").find(text_[at_]) != std::string_view::npos) ++at_;
    }

    Json parse_value(int depth) {
        skip_space();
        Json value;
        if (peek() == '{') return parse_object(depth + 1);
        if (peek() == '[') return parse_list(depth + 1);
        if (peek() == '"') {
            value.kind = Json::Kind::text;
            value.text = parse_text();
        } else if (take("true") || take("false")) {
            value.kind = Json::Kind::boolean;
            value.boolean = text_[at_ - 2] == 'u';
        } else if (!take("null")) {
            parse_number(value);
        }
        return value;
    }

    Json parse_list(int depth) {
        if (depth > kDeepest) fail();
        Json value;
        value.kind = Json::Kind::list;
        ++at_;
        skip_space();
        if (take("]")) return value;
        do value.items.push_back(parse_value(depth));
        while (skip_space(), take(","));
        if (!take("]")) fail();
        return value;
    }

    Json parse_object(int depth) {
        if (depth > kDeepest) fail();
        Json value;
        value.kind = Json::Kind::object;
        ++at_;
        skip_space();
        if (take("}")) return value;
        do {
            skip_space();
            if (peek() != '"') fail();
            std::string name = parse_text();
            skip_space();
            if (!take(":")) fail();
            value.entries.emplace_back(std::move(name), parse_value(depth));
        } while (skip_space(), take(","));
        if (!take("}")) fail();
        std::unordered_set<std::string_view> names;
        for (const auto& [name, entry] : value.entries)
            if (!names.insert(name).second && !twice_) twice_ = name;
        return value;
    }

    // JSON's numbers, and those that Python reads too: NaN, Infinity and -Infinity.
    void parse_number(Json& value) {
        value.kind = Json::Kind::other_number;
        if (take("NaN") || take("Infinity") || take("-Infinity")) return;
        const std::size_t first = at_;
        const auto digits = [&] {
            const std::size_t start = at_;
            while (peek() >= '0' && peek() <= '9') ++at_;
            return at_ > start;
        };
        take("-");
        if (!take("0") && !digits()) fail();
        const std::string_view whole = text_.substr(first, at_ - first);
        if (take(".") && !digits()) fail();
        if (take("e") || take("E")) {
            if (!take("+")) take("-");
            if (!digits()) fail();
        }
        if (first + whole.size() != at_) return;
        const auto [end, error] = std::from_chars(whole.data(), whole.data() + whole.size(), value.integer);
        if (error == std::errc()) value.kind = Json::Kind::integer;
    }

    std::string parse_text() {
        std::string text;
        for (++at_; peek() != '"'; ++at_) {
            if (static_cast<unsigned char>(peek()) < 0x20) fail();  // also at the end of the text
            if (peek() != '\\') {
                text += peek();
                continue;
            }
            ++at_;
            const std::size_t known = std::string_view("\"\\/bfnrt").find(peek());
            if (peek() == 'u') append_utf8(text, parse_code_point());
            else if (known == std::string_view::npos) fail();
            else text += "\"\\/\b\f\n\r\t"[known];
        }
        ++at_;
        return text;
    }

    // Called at the u of \uXXXX, leaves at the last digit. Two halves of a surrogate pair make one code point.
    std::uint32_t parse_code_point() {
        const std::uint32_t high = parse_hex();
        if (high < 0xD800 || high >= 0xDC00 || text_.substr(at_ + 1, 2) != "\\u") return high;
        const std::size_t before = at_;
        at_ += 2;
        const std::uint32_t low = parse_hex();
        if (low >= 0xDC00 && low < 0xE000) return 0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00);
        at_ = before;
        return high;
    }

    std::uint32_t parse_hex() {
        const std::string_view digits = text_.substr(std::min(at_ + 1, text_.size()), 4);
        std::uint32_t value = 0;
        const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value, 16);
        if (digits.size() != 4 || error != std::errc() || end != digits.data() + 4) fail();
        at_ += 4;
        return value;
    }

    std::string_view text_;
    const std::string& what_;
    std::size_t at_ = 0;
    std::optional<std::string> twice_;  // the first name that an object has twice
};

}  // namespace

const Json* Json::find(std::string_view name) const {
    for (const auto& [key, value] : entries)
        if (key == name) return &value;
    return nullptr;
}

Json parse_json(std::string_view text, const std::string& what) {
    return Parser(is_utf8(text) ? text : std::string_view(), what).document();
}

}  // namespace mglu
