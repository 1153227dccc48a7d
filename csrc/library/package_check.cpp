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

#include "mglu_ops.h"

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

// The value of " key=value" in a seal, or nothing.
std::string_view value_of(std::string_view seal, std::string_view key) {
    const std::string opening = " " + std::string(key) + "=";
    const std::size_t found = seal.find(opening);
    if (found == std::string_view::npos) return {};
    const std::size_t first = found + opening.size();
    return seal.substr(first, seal.find(' ', first) - first);
}

// "2.13" for "2.13.1+cu130"
std::string_view minor_version(std::string_view version) {
    const std::size_t dot = version.find('.');
    return dot == std::string_view::npos ? version : version.substr(0, version.find_first_of(".+", dot + 1));
}

}  // namespace

std::string package_problem(std::string_view package, std::string_view torch_version, std::string_view device) {
    const std::size_t end = package.size() - std::min(package.size(), kLongestSeal);
    const std::size_t start = package.substr(end).rfind(kSeal);
    if (start == std::string_view::npos)
        return "it has no seal at its end: it is truncated, or was not made by this version of mglu_ops.export";
    const std::string_view seal = package.substr(end + start);
    const std::string_view checksum = value_of(seal, "adler32");
    if (checksum.size() != kChecksumDigits || package.substr(package.size() - kChecksumDigits) != checksum ||
        adler32(package.substr(0, package.size() - kChecksumDigits)) != checksum)
        return "it is damaged: its checksum is wrong";
    const std::string made_by(value_of(seal, "torch")), target(value_of(seal, "device"));
    if (!torch_version.empty() && minor_version(made_by) != minor_version(torch_version))
        return "it was compiled by torch " + made_by + ", and this is " + std::string(torch_version) + "; export it anew";
    if (!device.empty() && target != device) return "it was compiled for " + target + ", not for " + std::string(device);
    return {};
}

std::string package_file_problem(const char* path, std::string_view torch_version, std::string_view device) {
    const int file = open(path, O_RDONLY | O_CLOEXEC);
    struct stat status{};
    if (file < 0 || fstat(file, &status) != 0) {
        const std::string reason = std::strerror(errno);
        if (file >= 0) close(file);
        return reason;
    }
    const auto size = static_cast<std::size_t>(status.st_size);
    void* data = size == 0 ? MAP_FAILED : mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file, 0);
    close(file);
    if (data == MAP_FAILED) return "it is empty, or cannot be read";
    const std::string problem = package_problem({static_cast<const char*>(data), size}, torch_version, device);
    munmap(data, size);
    return problem;
}

}  // namespace mglu

const char* mglu_check_package(const char* path, const char* torch_version, const char* device) {
    thread_local std::string message;
    const auto text = [](const char* given) { return given != nullptr ? std::string_view(given) : std::string_view(); };
    message = mglu::package_file_problem(path, text(torch_version), text(device));
    if (message.empty()) return nullptr;
    message = std::string(path) + ": " + message;
    return message.c_str();
}

const char* mglu_version() { return MGLU_OPS_VERSION; }
