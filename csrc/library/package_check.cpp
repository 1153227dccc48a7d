// A package is a zip archive of stored members (no compression), read here with every offset and size in doubt.
//
// The format is PKWARE's APPNOTE 6.3: an end record, which points to a directory, whose entries point to members. Sizes
// and offsets past 32 bits stand in "zip64" fields beside them.
#include "package_check.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

#include "mglu_ops.h"

namespace mglu {

namespace {

constexpr std::uint32_t kMember = 0x04034b50, kEntry = 0x02014b50, kEnd = 0x06054b50;
constexpr std::uint32_t kEnd64 = 0x06064b50, kLocator64 = 0x07064b50;
constexpr std::size_t kMemberSize = 30, kEntrySize = 46, kEndSize = 22, kEnd64Size = 56, kLocator64Size = 20;
constexpr std::uint32_t kIn64 = 0xffffffff;

struct Damaged {
    std::string words;
};

// Bytes that are read only where they are.
class Bytes {
  public:
    Bytes(const unsigned char* data, std::uint64_t size) : data_(data), size_(size) {}

    std::uint64_t size() const { return size_; }
    Bytes part(std::uint64_t offset, std::uint64_t size) const {
        if (offset > size_ || size > size_ - offset) throw Damaged{"it is truncated, or an offset in it points outside"};
        return {data_ + offset, size};
    }
    template <typename Number>
    Number number(std::uint64_t offset) const {
        const Bytes bytes = part(offset, sizeof(Number));
        Number value = 0;  // little endian
        for (std::size_t i = sizeof(Number); i-- > 0;) value = static_cast<Number>(value << 7 << 1 | bytes.data_[i]);
        return value;
    }
    std::string_view text() const { return {reinterpret_cast<const char*>(data_), static_cast<std::size_t>(size_)}; }
    std::uint32_t checksum() const;

  private:
    const unsigned char* data_;
    std::uint64_t size_;
};

// CRC-32 (IEEE 802.3), a byte at a time: as fast as most disks.
std::uint32_t Bytes::checksum() const {
    static const auto table = [] {
        std::array<std::uint32_t, 256> entries{};
        for (std::uint32_t i = 0; i < 256; ++i) {
            std::uint32_t value = i;
            for (int bit = 0; bit < 8; ++bit) value = value >> 1 ^ (value & 1 ? 0xedb88320u : 0u);
            entries[i] = value;
        }
        return entries;
    }();
    std::uint32_t crc = ~0u;
    for (std::uint64_t i = 0; i < size_; ++i) crc = crc >> 8 ^ table[(crc ^ data_[i]) & 0xff];
    return ~crc;
}

struct Entry {
    std::string_view name;
    std::uint32_t checksum;
    std::uint64_t size;
    std::uint64_t offset;
};

struct Directory {
    std::uint64_t entries;
    std::uint64_t offset;
};

// The end record is at the end, but for a comment whose length it tells.
std::uint64_t find_end(const Bytes& file) {
    if (file.size() < kEndSize) throw Damaged{"it is too short to be a package"};
    const std::uint64_t last = file.size() - kEndSize;
    for (std::uint64_t back = 0; back <= last && back <= 0xffff; ++back) {
        const std::uint64_t offset = last - back;
        if (file.number<std::uint32_t>(offset) == kEnd && file.number<std::uint16_t>(offset + 20) == back) return offset;
    }
    throw Damaged{"it is not a zip archive, or a truncated one"};
}

Directory find_directory(const Bytes& file) {
    const std::uint64_t end = find_end(file);
    Directory found{file.number<std::uint16_t>(end + 10), file.number<std::uint32_t>(end + 16)};
    const bool has_locator = end >= kLocator64Size && file.number<std::uint32_t>(end - kLocator64Size) == kLocator64;
    if (has_locator && (found.entries == 0xffff || found.offset == kIn64)) {
        const Bytes end64 = file.part(file.number<std::uint64_t>(end - kLocator64Size + 8), kEnd64Size);
        if (end64.number<std::uint32_t>(0) != kEnd64) throw Damaged{"its directory cannot be found"};
        found = {end64.number<std::uint64_t>(32), end64.number<std::uint64_t>(48)};
    }
    return found;
}

// The next entry of the directory; `offset` moves on.
Entry read_entry(const Bytes& file, std::uint64_t& offset) {
    const Bytes head = file.part(offset, kEntrySize);
    if (head.number<std::uint32_t>(0) != kEntry) throw Damaged{"its directory is damaged"};
    const auto name_size = head.number<std::uint16_t>(28);
    const auto extra_size = head.number<std::uint16_t>(30);
    Entry entry{file.part(offset + kEntrySize, name_size).text(), head.number<std::uint32_t>(16),
                head.number<std::uint32_t>(24), head.number<std::uint32_t>(42)};
    if (head.number<std::uint16_t>(10) != 0 || (head.number<std::uint16_t>(8) & 1) != 0)
        throw Damaged{std::string(entry.name) + " is compressed or encrypted, as torch never writes it"};
    std::uint64_t stored = head.number<std::uint32_t>(20);
    // Fields that do not fit stand in the extra field 1, in this order, those that fit do not.
    const Bytes extra = file.part(offset + kEntrySize + name_size, extra_size);
    for (std::uint64_t at = 0; at + 4 <= extra.size();) {
        const Bytes field = extra.part(at + 4, extra.number<std::uint16_t>(at + 2));
        if (extra.number<std::uint16_t>(at) == 1) {
            std::uint64_t next = 0;
            for (std::uint64_t* value : {&entry.size, &stored, &entry.offset})
                if (*value == kIn64) *value = field.number<std::uint64_t>(next), next += 8;
        }
        at += 4 + field.size();
    }
    if (stored != entry.size) throw Damaged{std::string(entry.name) + " has two sizes"};
    offset += kEntrySize + name_size + extra_size + head.number<std::uint16_t>(32);
    return entry;
}

Bytes read_member(const Bytes& file, const Entry& entry) {
    const Bytes head = file.part(entry.offset, kMemberSize);
    if (head.number<std::uint32_t>(0) != kMember) throw Damaged{std::string(entry.name) + " is not where it should be"};
    const auto name_size = head.number<std::uint16_t>(26);
    if (file.part(entry.offset + kMemberSize, name_size).text() != entry.name)
        throw Damaged{std::string(entry.name) + " has two names"};
    const Bytes member = file.part(entry.offset + kMemberSize + name_size + head.number<std::uint16_t>(28), entry.size);
    if (member.checksum() != entry.checksum) throw Damaged{"the checksum of " + std::string(entry.name) + " is wrong"};
    return member;
}

// The text after `"key": "` in a flat JSON object; texts of ours need no escapes.
std::optional<std::string_view> json_text(std::string_view json, const std::string& key) {
    const std::string opening = '"' + key + "\": \"";
    const std::size_t start = json.find(opening);
    if (start == std::string_view::npos) return std::nullopt;
    const std::size_t first = start + opening.size();
    return json.substr(first, json.find('"', first) - first);
}

bool ends_with(std::string_view text, std::string_view end) {
    return text.size() >= end.size() && text.substr(text.size() - end.size()) == end;
}

// "2.13" of "2.13.1+cu130"
std::string_view minor_version(std::string_view version) {
    const std::size_t dot = version.find('.');
    return dot == std::string_view::npos ? version : version.substr(0, version.find_first_of(".+", dot + 1));
}

void check_description(std::string_view json, std::string_view torch_version, std::string_view device) {
    const auto made = json_text(json, "mglu_ops_torch"), target = json_text(json, "mglu_ops_device");
    if (!made || !target) throw Damaged{"its description is damaged"};
    if (!torch_version.empty() && minor_version(*made) != minor_version(torch_version))
        throw Damaged{"it was compiled by torch " + std::string(*made) + ", and this is " + std::string(torch_version) +
                      "; export it anew"};
    if (!device.empty() && *target != device)
        throw Damaged{"it was compiled for " + std::string(*target) + ", not for " + std::string(device)};
}

}  // namespace

std::string package_problem(const unsigned char* data, std::size_t size, std::string_view torch_version,
                            std::string_view device) {
    try {
        const Bytes file(data, size);
        const Directory directory = find_directory(file);
        std::uint64_t offset = directory.offset;
        bool described = false;
        for (std::uint64_t i = 0; i < directory.entries; ++i) {
            const Entry entry = read_entry(file, offset);
            const Bytes member = read_member(file, entry);
            if (ends_with(entry.name, "_metadata.json") && json_text(member.text(), "mglu_ops_torch")) {
                check_description(member.text(), torch_version, device);
                described = true;
            }
        }
        return described ? "" : "it was not made by mglu_ops.export: it lacks its description";
    } catch (const Damaged& damaged) {
        return damaged.words;
    }
}

std::string package_file_problem(const char* path, std::string_view torch_version, std::string_view device) {
    const int file = open(path, O_RDONLY | O_CLOEXEC);
    struct stat status{};
    if (file < 0 || fstat(file, &status) != 0) {
        const std::string words = std::strerror(errno);
        if (file >= 0) close(file);
        return words;
    }
    const auto size = static_cast<std::size_t>(status.st_size);
    void* data = size == 0 ? MAP_FAILED : mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file, 0);
    close(file);
    if (data == MAP_FAILED) return "it is empty, or cannot be read";
    std::string words = package_problem(static_cast<const unsigned char*>(data), size, torch_version, device);
    munmap(data, size);
    return words;
}

}  // namespace mglu

const char* mglu_check_package(const char* path, const char* torch_version, const char* device) {
    thread_local std::string words;
    const auto text = [](const char* given) { return given != nullptr ? std::string_view(given) : std::string_view(); };
    words = mglu::package_file_problem(path, text(torch_version), text(device));
    if (words.empty()) return nullptr;
    words = std::string(path) + ": " + words;
    return words.c_str();
}

const char* mglu_version() { return MGLU_OPS_VERSION; }
