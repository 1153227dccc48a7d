#include "kernels.h"

#include <algorithm>
#include <utility>

// Defines `symbol` as the bytes of a file and a 0 after them; the assembler finds the file by -Wa,-I.
#define MGLU_EMBED(symbol, file)                                                                   \
    asm(".section .rodata\n.balign 64\n" #symbol ":\n.incbin \"" file "\"\n.byte 0\n.previous\n"); \
    extern "C" __attribute__((visibility("hidden"))) const unsigned char symbol[]

// CMake writes this file: an MGLU_EMBED of each source, and MGLU_SOURCES with their names and symbols.
#include "mglu_sources.inc"

// mglu_ops/packaging/device_code.py writes this file: an MGLU_EMBED of each cubin, and three tables that end with an
// empty row.
#if __has_include("mglu_kernels.inc")
#include "mglu_kernels.inc"
#else
namespace mglu::cuda {
constexpr Cubin kCubins[] = {{}};
constexpr TunedLaunch kTuned[] = {{}};
constexpr PlainKernel kPlain[] = {{}};
}  // namespace mglu::cuda
#endif

namespace mglu::cuda {

Kernels kernels() {
    const auto rows = [](const auto& table) { return std::span(table).first(std::size(table) - 1); };
    return {rows(kCubins), rows(kTuned), rows(kPlain)};
}

std::vector<Source> sources_of(std::string_view name) {
    const auto source = [](const char* file, const unsigned char* text) {
        return Source{file, reinterpret_cast<const char*>(text)};
    };
    std::vector<Source> sources{MGLU_SOURCES(source)};
    std::swap(sources.front(), *std::ranges::find(sources, name, &Source::name));
    return sources;
}

}  // namespace mglu::cuda
