// Registers the operators with torch's dispatcher, unless Python's mglu_ops has done so in this process.
//
// One binary serves torch 2.11 and later, because it uses only torch's C interface and the header-only part of torch's
// stable ABI.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>

#include "formats.h"
#include "python_process.h"
#include "torch_call.h"

namespace mglu {

namespace {

namespace stable = torch::stable;
using stable::detail::from;
using stable::detail::StableLibrary;
using stable::detail::to;

// Replaces torch's to<std::string>, which leaks a copy at each call (torch 2.11 to 2.13).
std::string to_string(StableIValue value) {
    const std::unique_ptr<StringOpaque, void (*)(StringHandle)> handle(
        to<StringHandle>(value), [](StringHandle owned) { torch_delete_string(owned); });
    std::size_t length = 0;
    const char* data = nullptr;
    raise_unless_ok(torch_string_length(handle.get(), &length), "a string");
    raise_unless_ok(torch_string_c_str(handle.get(), &data), "a string");
    return {data, length};
}

StableIValue give(Handle handle) { return from(stable::Tensor(handle.release())); }

// Boxed kernels, in torch's calling convention: a kernel takes ownership of the arguments on `stack`, and leaves the
// results there.
void boxed_pack_masks(StableIValue* stack, std::uint64_t, std::uint64_t) {
    const auto masks = to<stable::Tensor>(stack[0]);
    stack[0] = give(pack_masks(masks.get()));
}

void boxed_pack_logits(StableIValue* stack, std::uint64_t, std::uint64_t) {
    const auto mask_logits = to<stable::Tensor>(stack[0]);
    stack[0] = give(pack_logits(mask_logits.get()));
}

void boxed_unpack_masks(StableIValue* stack, std::uint64_t, std::uint64_t) {
    const auto packed_masks = to<stable::Tensor>(stack[0]);
    const auto in_features = to<std::int64_t>(stack[1]);
    stack[0] = give(unpack_masks(packed_masks.get(), in_features));
}

void boxed_forward(StableIValue* stack, std::uint64_t, std::uint64_t) {
    const auto x = to<stable::Tensor>(stack[0]);
    const auto weight = to<stable::Tensor>(stack[1]);
    const auto packed_masks = to<stable::Tensor>(stack[2]);
    const std::string activation = to_string(stack[3]);
    const auto mask_weights = to<std::optional<stable::Tensor>>(stack[4]);
    const auto weight_scale = to<std::optional<stable::Tensor>>(stack[5]);
    const std::string weight_format = to_string(stack[6]);
    const std::string activation_format = to_string(stack[7]);
    stack[0] = give(forward(x.get(), weight.get(), packed_masks.get(), activation,
                            mask_weights ? mask_weights->get() : nullptr, weight_scale ? weight_scale->get() : nullptr,
                            weight_format, activation_format));
}

void boxed_forward_ste(StableIValue* stack, std::uint64_t, std::uint64_t) {
    const auto x = to<stable::Tensor>(stack[0]);
    const auto weight = to<stable::Tensor>(stack[1]);
    const auto mask_logits = to<stable::Tensor>(stack[2]);
    const std::string activation = to_string(stack[3]);
    const auto mask_weights = to<std::optional<stable::Tensor>>(stack[4]);
    Handle packed_masks = pack_logits(mask_logits.get());
    Handle result = forward(x.get(), weight.get(), packed_masks.get(), activation,
                            mask_weights ? mask_weights->get() : nullptr, nullptr, "dense", "dense");
    stack[0] = give(std::move(result));
    stack[1] = give(std::move(packed_masks));
}

// mglu::experts_forward, or mglu::grouped_forward if `is_sorted`.
template <bool is_sorted>
void boxed_experts_forward(StableIValue* stack, std::uint64_t, std::uint64_t) {
    const auto x = to<stable::Tensor>(stack[0]);
    const auto weight = to<stable::Tensor>(stack[1]);
    const auto packed_masks = to<stable::Tensor>(stack[2]);
    const auto routing = to<stable::Tensor>(stack[3]);
    const std::string activation = to_string(stack[4]);
    const auto mask_weights = to<std::optional<stable::Tensor>>(stack[5]);
    const auto weight_scale = to<std::optional<stable::Tensor>>(stack[6]);
    const std::string weight_format = to_string(stack[7]);
    const std::string activation_format = to_string(stack[8]);
    stack[0] = give(experts_forward(x.get(), weight.get(), packed_masks.get(), routing.get(), is_sorted, activation,
                                    mask_weights ? mask_weights->get() : nullptr,
                                    weight_scale ? weight_scale->get() : nullptr, weight_format, activation_format));
}

void boxed_experts_down(StableIValue* stack, std::uint64_t, std::uint64_t) {
    const auto y = to<stable::Tensor>(stack[0]);
    const auto weight = to<stable::Tensor>(stack[1]);
    const auto expert_ids = to<stable::Tensor>(stack[2]);
    const auto expert_weights = to<stable::Tensor>(stack[3]);
    const auto weight_scale = to<std::optional<stable::Tensor>>(stack[4]);
    const std::string weight_format = to_string(stack[5]);
    stack[0] = give(experts_down(y.get(), weight.get(), expert_ids.get(), expert_weights.get(),
                                 weight_scale ? weight_scale->get() : nullptr, weight_format));
}

struct Kernel {
    const char* name;
    void (*function)(StableIValue*, std::uint64_t, std::uint64_t);
};

// The operators of this library. Python's mglu_ops defines all others of kSchemas.
constexpr Kernel kKernels[] = {
    {"pack_masks", boxed_pack_masks},
    {"pack_logits", boxed_pack_logits},
    {"unpack_masks", boxed_unpack_masks},
    {"forward", boxed_forward},
    {"forward_ste", boxed_forward_ste},
    {"experts_forward", boxed_experts_forward<false>},
    {"grouped_forward", boxed_experts_forward<true>},
    {"experts_down", boxed_experts_down},
};

const char* schema_of(std::string_view name) {
    for (const std::string_view schema : kSchemas)
        if (schema.substr(0, schema.find('(')) == name) return schema.data();
    throw std::logic_error("mglu: an operator has no schema");
}

class Registration {
  public:
    Registration() {
        if (python_has_operators()) return;
        // These kernels have the dispatch key CompositeExplicitAutograd. If Python imports mglu_ops later, it registers
        // kernels with the keys CPU and CUDA, which take precedence.
        for (const Kernel& kernel : kKernels) {
            schemas_.def(schema_of(kernel.name));
            kernels_.impl(kernel.name, kernel.function);
        }
    }

  private:
    StableLibrary schemas_{StableLibrary::Kind::FRAGMENT, "mglu", nullptr, __FILE__, __LINE__};
    StableLibrary kernels_{StableLibrary::Kind::IMPL, "mglu", "CompositeExplicitAutograd", __FILE__, __LINE__};
};

// torch refuses to define a schema twice, for example if the library is loaded from two paths. The registration by the
// first copy then stays.
std::unique_ptr<Registration> register_operators() noexcept {
    try {
        return std::make_unique<Registration>();
    } catch (const std::exception&) {
        return nullptr;
    }
}

const std::unique_ptr<Registration> registration = register_operators();

}  // namespace

}  // namespace mglu
