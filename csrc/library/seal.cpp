#include "seal.h"

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <stdexcept>
#include <vector>

#include "mglu_ops.h"

namespace mglu {

namespace {

constexpr int kFormat = 8;
constexpr std::streamoff kLongestSeal = 256, kChecksumDigits = 8;

[[noreturn]] void fail(const std::string& problem) { throw std::runtime_error(problem); }

// Returns the Adler-32 checksum of the next `bytes` bytes of a file.
std::string adler32(std::istream& file, std::streamoff bytes) {
    constexpr std::streamoff kBlock = 5552;  // the most bytes that can be summed in 32 bits before a reduction
    std::vector<char> block(kBlock);
    std::uint32_t a = 1, b = 0;
    for (; bytes > 0 && file; bytes -= kBlock) {
        file.read(block.data(), std::min(bytes, kBlock));
        std::for_each_n(block.begin(), file.gcount(), [&](char byte) { b += a += static_cast<unsigned char>(byte); });
        a %= 65521;
        b %= 65521;
    }
    char digits[kChecksumDigits + 1];
    std::snprintf(digits, sizeof digits, "%08x", b << 16 | a);
    return digits;
}

// Reads the seal of the file at `path`. Throws std::runtime_error if the seal's kind is not `kind`.
Seal seal_of(const std::string& path, const std::string& kind) {
    try {
        std::ifstream file(path, std::ios::binary);
        if (!file) fail(std::strerror(errno));
        Seal seal = read_seal(file);
        if (seal.kind != kind) fail("it is sealed as '" + seal.kind + "', must be '" + kind + "'");
        return seal;
    } catch (const std::runtime_error& problem) {
        fail(path + ": " + problem.what());
    }
}

void check_model(const std::string& path, const char* weights, const char* torch_version, const char* device) {
    const Seal seal = seal_of(path, "package");
    if (torch_version != nullptr && (torch_version + std::string(".")).rfind(seal.torch + ".", 0) != 0)
        fail(path + ": it was compiled by torch " + seal.torch + ", and this is " + torch_version + "; export it anew");
    if (device != nullptr && seal.device != device)
        fail(path + ": it was compiled for " + seal.device + ", not for " + device);
    if (seal.weights == "inside" && weights != nullptr) fail(path + ": it has its own weights");
    if (seal.weights != "inside" && weights == nullptr)
        fail(path + ": it has no weights in it: give the model the file of export(..., weights=FILE)");
    if (weights != nullptr) seal_of(weights, "weights");
}

}  // namespace

Seal read_seal(std::istream& file) {
    file.seekg(0, std::ios::end);
    const std::streamoff size = std::max<std::streamoff>(file.tellg(), 0);
    std::string tail(static_cast<std::size_t>(std::min(size, kLongestSeal)), '\0');
    file.seekg(size - static_cast<std::streamoff>(tail.size()));
    file.read(tail.data(), static_cast<std::streamsize>(tail.size()));
    const std::size_t start = tail.rfind("mglu_ops seal ");
    char kind[16] = "", torch[64] = "", device[16] = "", weights[16] = "";
    int format = 0;
    if (!file || start == std::string::npos ||
        std::sscanf(tail.c_str() + start, "mglu_ops seal %9d %15s torch=%63s device=%15s weights=%15s", &format, kind,
                    torch, device, weights) < 2)
        fail("it has no seal at its end: it is truncated, or was not made by mglu_ops.export");
    if (format != kFormat)
        fail("it has the format " + std::to_string(format) + ", must have " + std::to_string(kFormat) +
             ": export the model anew");
    file.seekg(0);
    if (adler32(file, size - kChecksumDigits) != tail.substr(tail.size() - kChecksumDigits))
        fail("it is damaged: its checksum is wrong");
    return {kind, torch, device, weights};
}

}  // namespace mglu

const char* mglu_check_model(const char* package, const char* weights, const char* torch_version, const char* device) {
    thread_local std::string problem;
    try {
        if (package == nullptr) mglu::fail("package: got null, must be the path of a package");
        mglu::check_model(package, weights, torch_version, device);
        return nullptr;
    } catch (const std::exception& error) {
        problem = error.what();
        return problem.c_str();
    }
}

const char* mglu_version() { return MGLU_OPS_VERSION; }
