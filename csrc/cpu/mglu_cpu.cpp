// The entry points: they check the call and choose the instruction set.
#include "mglu_cpu.h"

#include "kernels.h"

namespace mglu::cpu {
namespace {

// Returns the kernel of an instruction set, or null if this build or machine lacks the set, or if the kernel cannot
// take the dtype.
ForwardFunction find_forward(Isa isa, DType dtype) {
    switch (isa) {
        case Isa::portable: return forward_portable;
#if defined(__x86_64__)
        case Isa::avx2: return has_avx2() ? forward_avx2 : nullptr;
        case Isa::avx512: return has_avx512() ? forward_avx512 : nullptr;
#endif
#if defined(MGLU_BUILDS_BFLOAT16)
        case Isa::avx512_bf16: return dtype == DType::bfloat16 && has_avx512_bf16() ? forward_avx512_bf16 : nullptr;
        case Isa::amx: return dtype == DType::bfloat16 && has_amx() ? forward_amx : nullptr;
#endif
        default: return nullptr;
    }
}

// Limits in bfloat16, measured on a Xeon with AMX and on Zen 4 (README.md). AMX is fastest from kMinTokensForAmx tokens
// on. Without AMX, `vdpbf16ps` (avx512_bf16) is fastest for more than kMinTokensForAmx tokens, and with at most
// kMaxMasksForDots masks for any number of tokens.
constexpr std::int64_t kMinTokensForAmx = 4;
constexpr std::int64_t kMaxMasksForDots = 2;

// With more tokens than this, 8-bit weights are decoded once, in memory. few_tokens.h would decode them again for every
// two tokens.
constexpr std::int64_t kMaxTokensInRegisters = 8;

// True if decoding in registers is faster than forward_decoded, which decodes in memory.
bool is_decoded_in_registers(WeightFormat format, std::int64_t tokens) {
    return has_row_scales(format) && tokens <= kMaxTokensInRegisters;
}
// True if the kernel of an instruction set can decode in registers.
bool decodes_in_registers(Isa isa) { return isa == Isa::avx2 || isa == Isa::avx512 || isa == Isa::avx512_bf16; }

// The type in which weights are multiplied with x. Scales of blocks and groups are applied to the weights, which then
// need float32.
DType product_type(DType dtype, WeightFormat format) {
    return format == WeightFormat::dense || has_row_scales(format) ? dtype : DType::float32;
}

constexpr std::int64_t kActivationCount =
#define MGLU_ACTIVATION(...) +1
#include "activation.h"
    ;

template <class Enum>
bool is_in_range(Enum value, std::int64_t count) {
    const auto number = static_cast<std::int64_t>(value);
    return number >= 0 && number < count;
}

bool is_valid(const Forward& call) {
    const bool sizes = call.tokens >= 0 && call.out_features >= 0 && call.in_features >= 0;
    const bool masks = call.n_masks >= 0 && call.n_masks <= kMaxMasks;
    const bool mask_weight = !call.mask_weights || is_in_range(call.mask_weights_dtype, 3);
    const bool partials = !call.partials || (call.in_features > 0 && call.n_masks > 0);
    const bool is_dense = call.weight_format == WeightFormat::dense;
    const bool is_decoded = is_in_range(call.weight_format, kWeightFormats) && !is_dense && !call.partials;
    const bool has_no_scales =  // the tensor of scales is empty
        call.out_features == 0 || (call.in_features == 0 && !has_row_scales(call.weight_format));
    const bool weight = is_dense ? !call.weight_scale : is_decoded && (call.weight_scale || has_no_scales);
    return sizes && masks && mask_weight && partials && weight && is_in_range(call.dtype, 3) &&
           is_in_range(call.activation, kActivationCount) && is_in_range(call.isa, 6);
}

}  // namespace

Status forward(const Forward& call, ParallelFor parallel_for) {
    if (!is_valid(call) || !parallel_for) return Status::invalid_argument;
    const bool best = call.isa == Isa::best;
    const Isa isa = best ? best_isa(call.dtype, call.tokens, call.n_masks, call.weight_format) : call.isa;
    const ForwardFunction run = find_forward(isa, product_type(call.dtype, call.weight_format));
    if (!run || (isa == Isa::amx && call.n_masks == 0)) return Status::unsupported_isa;
    if (call.tokens == 0 || call.out_features == 0) return Status::ok;
    const bool is_read = call.weight_format == WeightFormat::dense ||
                         (is_decoded_in_registers(call.weight_format, call.tokens) && decodes_in_registers(isa));
    return is_read ? run(call, parallel_for) : forward_decoded(call, parallel_for, run);
}

bool supports(Isa isa, DType dtype) { return isa == Isa::best || find_forward(isa, dtype); }

Isa best_isa(DType x_dtype, std::int64_t tokens, std::int64_t n_masks, WeightFormat format) {
    const DType dtype = product_type(x_dtype, format);
    const bool in_registers = is_decoded_in_registers(format, tokens);
    if (tokens >= kMinTokensForAmx && n_masks > 0 && !in_registers && supports(Isa::amx, dtype)) return Isa::amx;
    const bool uses_dots = tokens > kMinTokensForAmx || n_masks <= kMaxMasksForDots || in_registers;
    if (uses_dots && supports(Isa::avx512_bf16, dtype)) return Isa::avx512_bf16;
    if (supports(Isa::avx512, dtype)) return Isa::avx512;
    return supports(Isa::avx2, dtype) ? Isa::avx2 : Isa::portable;
}

const char* status_message(Status status) {
    switch (status) {
        case Status::ok: return "ok";
        case Status::invalid_argument:
            return "a size, n_masks, dtype, weight format, activation or ISA is out of range";
        case Status::out_of_memory: return "no memory for scratch space";
        case Status::parallel_for_failed: return "the thread pool refused the work";
        case Status::unsupported_isa:
            return "this build or this machine lacks the instruction set, or the instruction set the type";
    }
    return "unknown";
}

std::int32_t serial(std::int64_t begin, std::int64_t end, std::int64_t, Body body, void* context) {
    if (begin < end) body(begin, end, context);
    return 0;
}

}  // namespace mglu::cpu

MGLU_EXPORT_CALL(forward, Forward)
MGLU_EXPORT_CALL(pack_masks, Pack)

MGLU_EXPORT std::int64_t mglu_cpu_isa(std::int64_t dtype, std::int64_t tokens, std::int64_t n_masks,
                                      std::int64_t weight_format) {
    return static_cast<std::int64_t>(mglu::cpu::best_isa(static_cast<mglu::cpu::DType>(dtype), tokens, n_masks,
                                                         static_cast<mglu::WeightFormat>(weight_format)));
}

MGLU_EXPORT std::int32_t mglu_cpu_supports(std::int64_t isa, std::int64_t dtype) {
    return mglu::cpu::supports(static_cast<mglu::cpu::Isa>(isa), static_cast<mglu::cpu::DType>(dtype));
}

MGLU_EXPORT const char* mglu_cpu_status_message(std::int32_t status) {
    return mglu::cpu::status_message(static_cast<mglu::cpu::Status>(status));
}
