// Runs a package in a process without Python, and compares its results with results of eager PyTorch (see kUsage).
#include <ATen/Parallel.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/version.h>

#include <chrono>
#include <fstream>
#include <iostream>
#include <iterator>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "../mglu_ops.h"

namespace torch::jit {

// Declared as in torch/csrc/jit/serialization/pickle.h, which takes longer to compile than all other headers here.
TORCH_API c10::IValue pickle_load(const std::vector<char>& data);

}  // namespace torch::jit

namespace {

const std::map<std::string, at::ScalarType> kDtypes = {
    {"float16", at::kHalf},   {"bfloat16", at::kBFloat16}, {"float32", at::kFloat},
    {"float64", at::kDouble}, {"int64", at::kLong},        {"int32", at::kInt},
    {"uint8", at::kByte},     {"bool", at::kBool},         {"float8_e4m3fn", at::kFloat8_e4m3fn},
};

at::Tensor read_tensor(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    std::string line, word, version, dtype;
    if (!std::getline(file, line)) throw std::runtime_error(path + " cannot be read");
    std::istringstream head(line);
    head >> word >> version >> dtype;
    const auto found = kDtypes.find(dtype);
    if (word != "mglu-tensor" || version != "1" || found == kDtypes.end())
        throw std::runtime_error(path + " is not a tensor file");
    std::vector<std::int64_t> sizes;
    for (std::int64_t size = 0; head >> size;) sizes.push_back(size);
    at::Tensor tensor = at::empty(sizes, at::TensorOptions().dtype(found->second));
    if (!file.read(static_cast<char*>(tensor.data_ptr()), static_cast<std::streamsize>(tensor.nbytes())))
        throw std::runtime_error(path + " is truncated");
    return tensor;
}

using Tensors = std::unordered_map<std::string, at::Tensor>;

// Reads a tensor of a weights file. An 8-bit float tensor is stored as the name of its dtype and its bytes, because
// pickle_load cannot read it.
at::Tensor read_entry(const c10::IValue& entry) {
    if (entry.isTensor()) return entry.toTensor();
    const auto& parts = entry.toTupleRef().elements();
    return parts[1].toTensor().view(kDtypes.at(parts[0].toStringRef()));
}

// Reads the tensors of a weights file, which torch.save wrote, by name.
Tensors read_weights(const std::string& path, at::Device device) {
    std::ifstream file(path, std::ios::binary);
    if (!file) throw std::runtime_error(path + " cannot be read");
    const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
    Tensors tensors;
    for (const auto& entry : torch::jit::pickle_load(bytes).toGenericDict())
        tensors.emplace(entry.key().toStringRef(), read_entry(entry.value()).to(device));
    return tensors;
}

// Gives a model the tensors that it needs. The tensors must outlive the model; several models may share them.
void give_weights(torch::inductor::AOTIModelPackageLoader& model, const Tensors& weights) {
    Tensors needed;
    for (const std::string& name : model.get_constant_fqns()) {
        const auto found = weights.find(name);
        if (found == weights.end()) throw std::runtime_error("the weights lack " + name);
        needed.insert(*found);
    }
    model.load_constants(needed, /*use_inactive=*/false, /*check_full_update=*/true, /*user_managed=*/true);
}

constexpr const char* kUsage =
    "usage: run_package MODEL.pt2 [--weights FILE] [--time CALLS] [--tolerance ERROR] INPUT RESULT [INPUT RESULT ...]\n"
    "\n"
    "Runs a package without Python, and compares its results with results of eager PyTorch.\n"
    "\n"
    "  INPUT RESULT       files of mglu_ops.packaging.tensor_file; the model has one input and one result\n"
    "  --weights FILE     the file of mglu_ops.export(..., weights=FILE), for a package without weights of its own\n"
    "  --time CALLS       also measure the time of a call, the best of five rounds of CALLS calls\n"
    "  --tolerance ERROR  the largest relative error (default 1e-5)\n"
    "\n"
    "The exit code is 0 if all results agree, 1 if one does not, 2 if something is wrong.";

double relative_error(const at::Tensor& result, const at::Tensor& expected) {
    if (result.sizes() != expected.sizes() || result.scalar_type() != expected.scalar_type())
        throw std::runtime_error("the result has another shape or dtype than RESULT");
    const at::Tensor exact = expected.to(at::kDouble);
    const double norm = exact.norm().item<double>();
    const double error = result.to(at::kCPU).to(at::kDouble).sub(exact).norm().item<double>();
    return norm > 0 ? error / norm : error;
}

struct Options {
    std::string package, weights;
    int calls = 0;
    double tolerance = 1e-5;
    std::vector<std::string> files;
};

// Parses a whole word as a number of at least 0, or throws.
template <class Number>
Number read_number(const std::string& name, const std::string& word) {
    std::istringstream stream(word);
    Number number;
    if (!(stream >> number) || !stream.eof() || !(number >= 0))
        throw std::invalid_argument(name + ": got '" + word + "', must be a number of at least 0");
    return number;
}

Options read_options(const std::vector<std::string>& words) {
    Options options;
    for (std::size_t i = 0; i < words.size(); ++i) {
        const std::string& word = words[i];
        const bool takes_value = word == "--time" || word == "--tolerance" || word == "--weights";
        if (takes_value && i + 1 == words.size()) throw std::invalid_argument(word + " needs a value");
        if (word == "--time") options.calls = read_number<int>(word, words[++i]);
        else if (word == "--tolerance") options.tolerance = read_number<double>(word, words[++i]);
        else if (word == "--weights") options.weights = words[++i];
        else if (word.rfind("--", 0) == 0) throw std::invalid_argument("got the unknown option " + word);
        else if (options.package.empty()) options.package = word;
        else options.files.push_back(word);
    }
    if (options.package.empty()) throw std::invalid_argument("a package is missing (--help shows the usage)");
    if (options.files.size() % 2 != 0) throw std::invalid_argument("INPUT " + options.files.back() + " has no RESULT");
    return options;
}

// Returns microseconds per call, the best of five rounds.
double time_calls(torch::inductor::AOTIModelPackageLoader& model, const at::Tensor& input, int calls) {
    double best = 1e30;
    for (int round = 0; round < 5; ++round) {
        const auto start = std::chrono::steady_clock::now();
        for (int i = 0; i < calls; ++i) model.run({input});
        if (input.is_cuda()) at::empty({1}, input.options()).item();  // waits for the device
        const std::chrono::duration<double, std::micro> spent = std::chrono::steady_clock::now() - start;
        best = std::min(best, spent.count() / calls);
    }
    return best;
}

int run(const Options& options) {
#ifndef MGLU_WITHOUT_LIBRARY  // defined for run_package_alone, which shows that a package needs no operator library
    const char* given = options.weights.empty() ? nullptr : options.weights.c_str();
    if (const char* problem = mglu_check_model(options.package.c_str(), given, TORCH_VERSION, nullptr))
        throw std::runtime_error(problem);
#endif
    at::set_num_threads(1);
    Tensors weights;  // declared first, so that it outlives the model
    torch::inductor::AOTIModelPackageLoader model(options.package);
    const auto device = model.get_metadata().at("AOTI_DEVICE_KEY") == "cuda" ? at::kCUDA : at::kCPU;
    if (!options.weights.empty()) give_weights(model, weights = read_weights(options.weights, device));
    bool agree = true;
    for (std::size_t i = 0; i < options.files.size(); i += 2) {
        const at::Tensor input = read_tensor(options.files[i]).to(device);
        const double error = relative_error(model.run({input}).at(0), read_tensor(options.files[i + 1]));
        std::cout << options.files[i] << ": relative error " << error;
        if (options.calls > 0) std::cout << ", " << time_calls(model, input, options.calls) << " us a call";
        std::cout << std::endl;
        agree = agree && error <= options.tolerance;  // also false for NaN
    }
    return agree ? 0 : 1;
}

}  // namespace

int main(int count, char** words) {
    try {
        const std::vector<std::string> given(words + 1, words + count);
        for (const std::string& word : given)
            if (word == "--help" || word == "-h") return std::cout << kUsage << std::endl, 0;
        return run(read_options(given));
    } catch (const std::exception& error) {
        std::cerr << "run_package: " << error.what() << std::endl;
        return 2;
    }
}
