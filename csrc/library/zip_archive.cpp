#include "zip_archive.h"

#include <array>
#include <cstdio>
#include <cstring>
#include <unordered_set>

namespace mglu {

namespace {

constexpr std::size_t kLongestComment = 256, kMostDirectoryBytes = 1 << 26;
constexpr std::uint32_t kLargest32 = 0xFFFFFFFF;  // stands for a value in an extra field
constexpr std::size_t kLocalSize = 30, kEntrySize = 46, kEndSize = 22, kEnd64Size = 56, kLocator64Size = 20;
constexpr std::uint16_t kFlags = 0x0008 | 0x0800;  // a descriptor follows; names are UTF-8
constexpr std::uint32_t kFileType = 0170000, kRegularFile = 0100000;

[[noreturn]] void damaged() { throw FileProblem("its zip directory is damaged"); }

[[noreturn]] void outside(std::string_view name) {
    throw FileProblem("member " + quoted(name) + " overlaps another one, or lies outside of the file");
}

// Reads the fields of a record of the archive, one after another. The caller has checked that they are there.
class Fields {
  public:
    explicit Fields(std::string_view bytes) : bytes_(bytes) {}
    bool starts_with(std::string_view signature) {
        const bool is_there = bytes_.substr(0, signature.size()) == signature;
        bytes_.remove_prefix(signature.size());
        return is_there;
    }
    std::uint16_t u16() { return static_cast<std::uint16_t>(next(2)); }
    std::uint32_t u32() { return static_cast<std::uint32_t>(next(4)); }
    std::uint64_t u64() { return next(8); }
    void skip(std::size_t bytes) { bytes_.remove_prefix(bytes); }

  private:
    std::uint64_t next(std::size_t size) {
        std::uint64_t value = 0;
        for (std::size_t i = size; i-- > 0;) value = value << 8 | static_cast<unsigned char>(bytes_[i]);
        bytes_.remove_prefix(size);
        return value;
    }
    std::string_view bytes_;
};

struct Directory {
    std::uint64_t members;
    std::size_t start, end;
};

Directory find_directory(std::string_view archive) {
    const std::size_t tail_start = archive.size() - std::min(archive.size(), kEndSize + kLongestComment);
    const std::size_t at = archive.substr(tail_start).rfind("PK\5\6");
    if (at == std::string_view::npos || archive.size() - tail_start - at < kEndSize)
        throw FileProblem("it is no zip archive of torch, or it is truncated");
    std::size_t last_record = tail_start + at;
    Fields end(archive.substr(last_record + 4));
    std::uint32_t disk = end.u16(), first_disk = end.u16();
    std::uint64_t here = end.u16(), count = end.u16(), size = end.u32(), start = end.u32();
    if (last_record + kEndSize + end.u16() != archive.size()) damaged();
    if (last_record >= kEnd64Size + kLocator64Size) {
        Fields locator(archive.substr(last_record - kLocator64Size));
        if (locator.starts_with("PK\6\7")) {
            last_record -= kEnd64Size + kLocator64Size;
            Fields record(archive.substr(last_record));
            if (!record.starts_with("PK\6\6") || record.u64() != kEnd64Size - 12) damaged();
            if (locator.u32() != 0 || locator.u64() != last_record || locator.u32() != 1) damaged();
            record.skip(4);
            disk = record.u32(), first_disk = record.u32();
            here = record.u64(), count = record.u64(), size = record.u64(), start = record.u64();
        }
    }
    if (disk != 0 || first_disk != 0 || here != count || start > last_record || size != last_record - start) damaged();
    return {count, static_cast<std::size_t>(start), last_record};
}

// Throws unless the name is that of a file below the folder that an archive is extracted to.
void check_name(std::string_view name) {
    const auto is_letter = [](char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); };
    bool is_good = !(name.size() >= 2 && is_letter(name[0]) && name[1] == ':');
    for (const char c : name) is_good = is_good && static_cast<unsigned char>(c) >= 0x20 && c != 0x7f && c != '\\';
    for (std::size_t first = 0; is_good && first <= name.size();) {
        const std::size_t slash = std::min(name.find('/', first), name.size());
        const std::string_view part = name.substr(first, slash - first);
        is_good = !part.empty() && part != "." && part != "..";
        first = slash + 1;
    }
    if (!is_good)
        throw FileProblem("the name of member " + quoted(name) + " must be a relative path between single slashes, "
                          "without '.', '..', backslashes, drive letters and control characters");
}

// Size, stored size and offset of an entry. Those that need more than 32 bits are in an extra field.
void read_zip64(std::string_view extra, std::array<std::uint64_t, 3>& values) {
    std::string_view large;
    while (!extra.empty()) {
        if (extra.size() < 4) damaged();
        Fields head(extra);
        const std::uint16_t kind = head.u16(), size = head.u16();
        if (extra.size() < 4u + size) damaged();
        if (kind == 1) {
            if (!large.empty() || size % 8 != 0) damaged();
            large = extra.substr(4, size);
        }
        extra.remove_prefix(4u + size);
    }
    for (std::uint64_t& value : values) {
        if (value != kLargest32) continue;
        if (large.empty()) damaged();
        value = Fields(large).u64();
        large.remove_prefix(8);
    }
}

// The bytes of a member, after a header of its own that must agree with its entry.
std::string_view bytes_of(std::string_view archive, std::uint64_t offset, std::uint64_t size, std::string_view name,
                          std::size_t limit) {
    if (offset > limit || limit - offset < kLocalSize + name.size()) outside(name);
    Fields local(archive.substr(offset));
    const bool is_header = local.starts_with("PK\3\4");
    local.skip(2);
    const std::uint16_t flags = local.u16(), method = local.u16();
    local.skip(16);
    const std::size_t name_size = local.u16(), extra_size = local.u16();
    if (!is_header || method != 0 || (flags & ~kFlags) != 0 || name_size != name.size() ||
        archive.substr(offset + kLocalSize, name.size()) != name)
        throw FileProblem("member " + quoted(name) + " has another name, method or flags in the header before its bytes");
    const std::size_t start = offset + kLocalSize + name.size() + extra_size;
    if (start > limit || size > limit - start) outside(name);
    return archive.substr(start, size);
}

struct Entry {
    Member member;
    std::size_t header;  // the offset of the member's own header
    std::size_t size;    // of the entry
};

// `directory` starts with the entry. The header of a member and its bytes must be before `limit`.
Entry read_entry(std::string_view archive, std::string_view directory, std::size_t limit) {
    if (directory.size() < kEntrySize) damaged();
    Fields entry(directory);
    const bool is_entry = entry.starts_with("PK\1\2");
    entry.skip(4);
    const std::uint16_t flags = entry.u16(), method = entry.u16();
    entry.skip(4);
    const std::uint32_t checksum = entry.u32();
    const std::uint64_t stored = entry.u32(), size = entry.u32();
    const std::size_t name_size = entry.u16(), extra_size = entry.u16(), comment_size = entry.u16();
    const std::uint16_t disk = entry.u16();
    entry.skip(2);
    const std::uint32_t attributes = entry.u32();
    const std::size_t entry_size = kEntrySize + name_size + extra_size + comment_size;
    if (!is_entry || directory.size() < entry_size) damaged();
    const std::string_view name = directory.substr(kEntrySize, name_size);
    check_name(name);
    std::array<std::uint64_t, 3> values{size, stored, entry.u32()};
    read_zip64(directory.substr(kEntrySize + name_size, extra_size), values);
    if (method != 0 || values[0] != values[1])
        throw FileProblem("member " + quoted(name) + " is compressed (method " + std::to_string(method) +
                          "), must be stored as it is");
    if ((flags & ~kFlags) != 0) {
        char digits[8];
        std::snprintf(digits, sizeof digits, "0x%04x", flags);
        throw FileProblem("member " + quoted(name) + " has the flags " + digits +
                          ": it is encrypted, or no file of torch's");
    }
    const std::uint32_t type = attributes >> 16 & kFileType;
    if (type != 0 && type != kRegularFile)
        throw FileProblem("member " + quoted(name) + " is a link or a special file, must be a regular file");
    if (disk != 0) damaged();
    const std::string_view bytes = bytes_of(archive, values[2], values[0], name, limit);
    return {{name, bytes, checksum}, static_cast<std::size_t>(values[2]), entry_size};
}

std::string lower(std::string_view name) {
    std::string text(name);
    for (char& c : text)
        if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
    return text;
}

}  // namespace

std::vector<Member> read_members(std::string_view archive) {
    const auto [count, start, end] = find_directory(archive);
    if (end - start > kMostDirectoryBytes)
        throw FileProblem("its zip directory has " + std::to_string(end - start) + " bytes, must have at most " +
                          std::to_string(kMostDirectoryBytes));
    std::string_view directory = archive.substr(start, end - start);
    std::vector<Member> members;
    std::unordered_set<std::string> names;
    std::size_t stored_to = 0;
    for (std::uint64_t i = 0; i < count; ++i) {
        const Entry entry = read_entry(archive, directory, start);
        const std::string_view name = entry.member.name;
        // torch's loader looks a name up without regard to the case of ASCII letters.
        if (!names.insert(lower(name)).second)
            throw FileProblem("member " + quoted(name) + " is there twice, or differs from another only in case");
        if (entry.header < stored_to) outside(name);
        stored_to = static_cast<std::size_t>(entry.member.bytes.data() - archive.data()) + entry.member.bytes.size();
        members.push_back(entry.member);
        directory.remove_prefix(entry.size);
    }
    if (!directory.empty()) damaged();
    return members;
}

std::uint32_t crc32(std::string_view bytes) {
    static const auto table = [] {
        std::array<std::uint32_t, 256> values{};
        for (std::uint32_t i = 0; i < 256; ++i) {
            values[i] = i;
            for (int bit = 0; bit < 8; ++bit) values[i] = values[i] >> 1 ^ (values[i] & 1 ? 0xEDB88320 : 0);
        }
        return values;
    }();
    std::uint32_t checksum = 0xFFFFFFFF;
    for (const char byte : bytes) checksum = checksum >> 8 ^ table[(checksum ^ static_cast<unsigned char>(byte)) & 0xFF];
    return ~checksum;
}

std::string quoted(std::string_view text) {
    constexpr std::size_t kMost = 100;
    std::string result = "'";
    for (const char c : text.substr(0, kMost)) {
        char escaped[8];
        std::snprintf(escaped, sizeof escaped, "\\x%02x", static_cast<unsigned char>(c));
        result += c >= 0x20 && c < 0x7f ? std::string(1, c) : std::string(escaped);
    }
    return result + (text.size() > kMost ? "'..." : "'");
}

}  // namespace mglu
