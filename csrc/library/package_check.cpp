#include "package_check.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <optional>

#include "mglu_ops.h"
#include "package_description.h"
#include "zip_archive.h"

namespace mglu {

namespace {

constexpr std::string_view kSeal = "mglu_ops seal 1 ";
constexpr std::size_t kLongestSeal = 256, kChecksumDigits = 8;

std::string adler32(std::string_view bytes) {
    constexpr std::size_t kBlock = 5552;  // the most bytes whose sums fit into 32 bits
    std::uint32_t a = 1, b = 0;
    for (std::size_t first = 0; first < bytes.size(); first += kBlock) {
        for (const char byte : bytes.substr(first, kBlock)) b += a += static_cast<unsigned char>(byte);
        a %= 65521;
        b %= 65521;
    }
    char digits[kChecksumDigits + 1];
    std::snprintf(digits, sizeof digits, "%08x", b << 16 | a);
    return digits;
}

struct Seal {
    std::string_view torch_version, device, checksum;
};

// The seal at the end of a package, if there is one.
std::optional<Seal> find_seal(std::string_view package) {
    const std::size_t tail = package.size() - std::min(package.size(), kLongestSeal);
    const std::size_t start = package.substr(tail).rfind(kSeal);
    if (start == std::string_view::npos) return {};
    std::string_view rest = package.substr(tail + start + kSeal.size());
    // Takes "name=value", of which the value is printable ASCII without spaces, and one space after it.
    const auto take = [&rest](std::string_view name) -> std::string_view {
        const std::size_t end = std::min(rest.find(' '), rest.size());
        const std::string_view value = rest.substr(0, end).substr(std::min(end, name.size()));
        const bool is_printable = std::all_of(value.begin(), value.end(), [](char c) { return c > ' ' && c < 0x7f; });
        if (rest.substr(0, name.size()) != name || !is_printable) return {};
        rest.remove_prefix(std::min(end + 1, rest.size()));
        return value;
    };
    const Seal seal{take("torch="), take("device="), take("adler32=")};
    const bool is_hex = seal.checksum.find_first_not_of("0123456789abcdef") == std::string_view::npos;
    if (seal.torch_version.empty() || seal.device.empty() || seal.checksum.size() != kChecksumDigits || !is_hex ||
        package.substr(package.size() - kChecksumDigits) != seal.checksum)
        return {};
    return seal;
}

// "2.13" for "2.13.1+cu130"
std::string_view minor_version(std::string_view version) {
    const std::size_t dot = version.find('.');
    return dot == std::string_view::npos ? version : version.substr(0, version.find_first_of(".+", dot + 1));
}

}  // namespace

bool check_package(std::string_view package, std::string_view torch_version, std::string_view device) {
    const std::optional<Seal> seal = find_seal(package);
    if (!seal) throw FileProblem("it has no seal at its end: it is truncated, or was not made by mglu_ops.export");
    if (adler32(package.substr(0, package.size() - kChecksumDigits)) != seal->checksum)
        throw FileProblem("it is damaged: its checksum is wrong");
    const bool holds_weights = check_description(read_members(package), seal->torch_version, seal->device);
    const std::string made_by(seal->torch_version), target(seal->device);
    if (!torch_version.empty() && minor_version(made_by) != minor_version(torch_version))
        throw FileProblem("it was compiled by torch " + made_by + ", and this is " + std::string(torch_version) +
                          "; export it anew");
    if (!device.empty() && target != device)
        throw FileProblem("it was compiled for " + target + ", not for " + std::string(device));
    return holds_weights;
}

void check_weights(std::string_view archive) {
    constexpr std::string_view kValue = "/data.pkl";
    bool has_value = false;
    for (const Member& member : read_members(archive)) {
        if (crc32(member.bytes) != member.crc32)
            throw FileProblem("it is damaged: the checksum of member " + quoted(member.name) + " is wrong");
        const std::size_t slash = member.name.find('/');
        has_value = has_value || (slash != std::string_view::npos && member.name.substr(slash) == kValue);
    }
    if (!has_value) throw FileProblem("it is no file of weights: torch.save did not write it");
}

namespace {

// The bytes of a file, mapped.
class Mapping {
  public:
    explicit Mapping(const char* path) {
        const int file = open(path, O_RDONLY | O_CLOEXEC);
        struct stat status{};
        if (file < 0 || fstat(file, &status) != 0) {
            const std::string reason = std::strerror(errno);
            if (file >= 0) close(file);
            throw FileProblem(reason);
        }
        size_ = static_cast<std::size_t>(status.st_size);
        const bool is_file = S_ISREG(status.st_mode) && size_ > 0;
        data_ = is_file ? mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file, 0) : MAP_FAILED;
        close(file);
        if (data_ == MAP_FAILED) throw FileProblem("it is empty, no file, or cannot be read");
    }
    Mapping(const Mapping&) = delete;
    ~Mapping() { munmap(data_, size_); }
    std::string_view bytes() const { return {static_cast<const char*>(data_), size_}; }

  private:
    void* data_;
    std::size_t size_;
};

// Null if `check` finds no problem with the bytes of a file, else the path and the problem; valid until the thread's next
// call.
template <typename Check>
const char* problem_of(const char* path, Check check) {
    thread_local std::string message;
    const std::string name = path != nullptr ? path : "path (null)";
    try {
        check(Mapping(name.c_str()).bytes());
        return nullptr;
    } catch (const std::exception& error) {
        message = name + ": " + error.what();
        return message.c_str();
    }
}

}  // namespace

}  // namespace mglu

const char* mglu_check_package(const char* path, const char* torch_version, const char* device) {
    const auto text = [](const char* given) { return given != nullptr ? std::string_view(given) : std::string_view(); };
    return mglu::problem_of(path, [&](std::string_view package) {
        mglu::check_package(package, text(torch_version), text(device));
    });
}

const char* mglu_check_model(const char* path, const char* weights, const char* torch_version, const char* device) {
    const auto text = [](const char* given) { return given != nullptr ? std::string_view(given) : std::string_view(); };
    const char* problem = mglu::problem_of(path, [&](std::string_view package) {
        const bool holds_weights = mglu::check_package(package, text(torch_version), text(device));
        if (!holds_weights && weights == nullptr)
            throw mglu::FileProblem("it has no weights in it: give the model the file of export(..., weights=FILE)");
        if (holds_weights && weights != nullptr) throw mglu::FileProblem("it has its own weights");
    });
    return problem != nullptr || weights == nullptr ? problem : mglu_check_weights(weights);
}

const char* mglu_check_weights(const char* path) { return mglu::problem_of(path, mglu::check_weights); }

const char* mglu_version() { return MGLU_OPS_VERSION; }
