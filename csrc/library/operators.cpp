// Registers the operators with torch's dispatcher, unless Python's mglu_ops has done so in this process.
//
// One binary serves torch 2.11 and later, because it uses only torch's C interface and the header-only part of torch's
// stable ABI.
#include <dlfcn.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <deque>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "formats.h"
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

// The arguments of a call in torch's calling convention, read in the order of the schema. A kernel takes ownership of
// the arguments on the stack, and leaves the results there.
class Arguments {
  public:
    explicit Arguments(StableIValue* stack) : next_(stack) {}

    AtenTensorHandle tensor() { return tensors_.emplace_back(to<stable::Tensor>(*next_++)).get(); }
    std::optional<AtenTensorHandle> optional_tensor() {
        auto found = to<std::optional<stable::Tensor>>(*next_++);
        return found ? std::optional(tensors_.emplace_back(std::move(*found)).get()) : std::nullopt;
    }
    std::string_view text() { return texts_.emplace_back(to_string(*next_++)); }
    template <typename T>
    T number() {
        return to<T>(*next_++);
    }

  private:
    StableIValue* next_;
    std::deque<stable::Tensor> tensors_;
    std::deque<std::string> texts_;
};

// mglu::pack_masks or mglu::pack_logits.
template <Handle pack(AtenTensorHandle)>
void boxed_pack(StableIValue* stack, std::uint64_t, std::uint64_t) {
    stack[0] = give(pack(Arguments(stack).tensor()));
}

void boxed_unpack_masks(StableIValue* stack, std::uint64_t, std::uint64_t) {
    Arguments arguments(stack);
    const AtenTensorHandle packed_masks = arguments.tensor();
    stack[0] = give(unpack_masks(packed_masks, arguments.number<std::int64_t>()));
}

enum class Rows { of_one_layer, with_ids, sorted };

// mglu::forward, mglu::experts_forward or mglu::grouped_forward.
template <Rows rows>
void boxed_forward(StableIValue* stack, std::uint64_t, std::uint64_t) {
    Arguments arguments(stack);
    Given<AtenTensorHandle> given;
    given.x = arguments.tensor();
    given.weight = arguments.tensor();
    given.packed_masks = arguments.tensor();
    if (rows != Rows::of_one_layer) given.routing = arguments.tensor();
    given.is_sorted = rows == Rows::sorted;
    given.read_options(arguments, true);
    stack[0] = give(forward(given));
}

void boxed_forward_ste(StableIValue* stack, std::uint64_t, std::uint64_t) {
    Arguments arguments(stack);
    Given<AtenTensorHandle> given;
    given.x = arguments.tensor();
    given.weight = arguments.tensor();
    Handle packed_masks = pack_logits(arguments.tensor());
    given.packed_masks = packed_masks.get();
    given.read_options(arguments, false);
    stack[0] = give(forward(given));
    stack[1] = give(std::move(packed_masks));
}

void boxed_experts_down(StableIValue* stack, std::uint64_t, std::uint64_t) {
    Arguments arguments(stack);
    const AtenTensorHandle y = arguments.tensor(), weight = arguments.tensor(), expert_ids = arguments.tensor();
    const AtenTensorHandle expert_weights = arguments.tensor();
    const std::optional<AtenTensorHandle> weight_scale = arguments.optional_tensor();
    stack[0] = give(experts_down(y, weight, expert_ids, expert_weights, weight_scale, arguments.text()));
}

struct Kernel {
    const char* name;
    void (*function)(StableIValue*, std::uint64_t, std::uint64_t);
};

// The operators of this library. Python's mglu_ops defines all other operators of kSchemas.
constexpr Kernel kKernels[] = {
    {"pack_masks", boxed_pack<pack_masks>},
    {"pack_logits", boxed_pack<pack_logits>},
    {"unpack_masks", boxed_unpack_masks},
    {"forward", boxed_forward<Rows::of_one_layer>},
    {"forward_ste", boxed_forward_ste},
    {"experts_forward", boxed_forward<Rows::with_ids>},
    {"grouped_forward", boxed_forward<Rows::sorted>},
    {"experts_down", boxed_experts_down},
};

const char* schema_of(std::string_view name) {
    for (const std::string_view schema : kSchemas)
        if (schema.substr(0, schema.find('(')) == name) return schema.data();
    throw std::logic_error("mglu: an operator has no schema");
}

// True if Python's mglu_ops has registered the operators in this process. torch's stable ABI cannot tell if a schema
// exists, and defining a schema twice is an error, which torch 2.11 also logs. Therefore the function asks the process's
// Python interpreter, if there is one, through Python's stable ABI.
bool python_has_operators() {
    const auto find = [](const char* name) { return dlsym(RTLD_DEFAULT, name); };
    const auto is_initialized = reinterpret_cast<int (*)()>(find("Py_IsInitialized"));
    const auto ensure = reinterpret_cast<int (*)()>(find("PyGILState_Ensure"));
    const auto release = reinterpret_cast<void (*)(int)>(find("PyGILState_Release"));
    const auto modules = reinterpret_cast<void* (*)()>(find("PyImport_GetModuleDict"));
    const auto get = reinterpret_cast<void* (*)(void*, const char*)>(find("PyDict_GetItemString"));
    if (!is_initialized || !ensure || !release || !modules || !get || !is_initialized()) return false;
    const int state = ensure();  // Python may have released the GIL while it loads a library
    const bool found = get(modules(), "mglu_ops.ops") != nullptr;
    release(state);
    return found;
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
