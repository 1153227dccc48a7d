#include "kernels.h"

// Puts a file into this object; the assembler finds it by -Wa,-I.
#define MGLU_EMBED(symbol, file)                                                                  \
    asm(".section .rodata\n.balign 64\n" #symbol ":\n.incbin \"" file "\"\n.byte 0\n.previous\n"); \
    extern "C" __attribute__((visibility("hidden"))) const unsigned char symbol[]

MGLU_EMBED(mglu_source_plain, "cuda/plain.cu");
MGLU_EMBED(mglu_source_activation, "cuda/activation.cuh");
MGLU_EMBED(mglu_source_element, "cuda/element.cuh");
MGLU_EMBED(mglu_source_packed_masks, "cuda/packed_masks.cuh");
MGLU_EMBED(mglu_source_params, "cuda/params.cuh");
MGLU_EMBED(mglu_source_ptx, "cuda/ptx.cuh");
MGLU_EMBED(mglu_source_route_weights, "cuda/route_weights.cuh");

// Generated: MGLU_EMBED of cubins, and the tables kCubins, kTuned and kPlain, in each of which the last entry is empty.
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

Kernels kernels() { return {kCubins, kTuned, std::size(kTuned) - 1, kPlain, std::size(kPlain) - 1}; }

std::vector<Source> plain_sources() {
    const auto text = [](const unsigned char* bytes) { return reinterpret_cast<const char*>(bytes); };
    return {{"plain.cu", text(mglu_source_plain)},       {"activation.cuh", text(mglu_source_activation)},
            {"element.cuh", text(mglu_source_element)},  {"packed_masks.cuh", text(mglu_source_packed_masks)},
            {"params.cuh", text(mglu_source_params)},    {"ptx.cuh", text(mglu_source_ptx)},
            {"route_weights.cuh", text(mglu_source_route_weights)}};
}

}  // namespace mglu::cuda
