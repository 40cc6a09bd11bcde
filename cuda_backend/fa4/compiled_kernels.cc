#include "compiled_kernels.h"

#include <dlfcn.h>

#include "driver.h"

namespace attn_dispatch {
namespace {

// Set once, by a thread that holds the mutex. Leaked on purpose, as in library.cc.
std::atomic<const CompiledLibrary*> loaded{nullptr};

std::mutex& loading_mutex() {
  static auto* instance = new std::mutex;
  return *instance;
}

Status failed(const char* what, int32_t result) {
  const int32_t first = driver_failure() != 0 ? driver_failure() : result;
  return {Code::kDevice, std::string(what) + ": " + driver_error_name(first)};
}

Status wrong_library(const std::string& path, const std::string& why) {
  return {Code::kLibrary, path + " " + why + "; build it again with `attn-dispatch build-fa4`"};
}

}  // namespace

Status CompiledKernel::load_code() {
  if (code_) return {};
  void** code = &code_;
  int32_t result = 0;
  struct {
    void*** code;
    int32_t* result;
  } arguments = {&code, &result};
  kernel_.load(reinterpret_cast<void**>(&arguments));
  if (result == 0 && driver_failure() == 0) return {};
  code_ = nullptr;
  return failed("loading a kernel", result);
}

Status CompiledKernel::load(int32_t ordinal) {
  ATTN_RETURN_IF_ERROR(check_ordinal(ordinal));
  const uint64_t bit = uint64_t{1} << ordinal;
  if (devices_.load(std::memory_order_acquire) & bit) return {};
  // The driver is not loaded yet if cuDNN was not used.
  if (!has_driver()) return {Code::kLibrary, "no CUDA driver library can be loaded"};
  std::lock_guard<std::mutex> lock(mutex_);
  if (devices_.load(std::memory_order_relaxed) & bit) return {};
  forget_driver_failure();
  ATTN_RETURN_IF_ERROR(load_code());
  void** code = &code_;
  int32_t device = ordinal, result = 0;
  struct {
    void*** code;
    int32_t* device;
    int32_t* result;
  } arguments = {&code, &device, &result};
  kernel_.load_on_device(reinterpret_cast<void**>(&arguments));
  if (result != 0 || driver_failure() != 0) return failed("preparing a kernel", result);
  devices_.fetch_or(bit, std::memory_order_release);
  return {};
}

Status CompiledKernel::run(void** arguments, int32_t count, const int32_t* result) const {
  forget_driver_failure();
  kernel_.run(arguments, count);
  if (*result == 0 && driver_failure() == 0) return {};
  return failed("launching a kernel", *result);
}

CompiledSet* CompiledLibrary::find(const std::string& name) const {
  for (const auto& set : sets) {
    if (name == set->facts.name) return set.get();
  }
  return nullptr;
}

const CompiledLibrary* compiled_library() { return loaded.load(std::memory_order_acquire); }

Result<const CompiledLibrary*> load_compiled_library(const std::string& path) {
  std::lock_guard<std::mutex> lock(loading_mutex());
  if (const CompiledLibrary* library = compiled_library()) return library;
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!handle) {
    const char* why = dlerror();
    return wrong_library(path, std::string("cannot be loaded: ") + (why ? why : "no reason given"));
  }
  auto* get = reinterpret_cast<AttnFa4Get*>(dlsym(handle, ATTN_DISPATCH_FA4_GET));
  if (!get) {
    dlclose(handle);
    return wrong_library(path, "has no FlashAttention-4 kernels");
  }
  const AttnFa4Library* found = get();
  if (const int32_t interface = found->interface; interface != ATTN_DISPATCH_FA4_INTERFACE) {
    dlclose(handle);
    return wrong_library(path, "has another interface: expected " +
                                   std::to_string(ATTN_DISPATCH_FA4_INTERFACE) + ", got " +
                                   std::to_string(interface));
  }
  *found->driver = fa4_driver();
  auto* library = new CompiledLibrary{path, found->versions, {}};
  for (int32_t i = 0; i < found->count; ++i) {
    library->sets.push_back(std::make_unique<CompiledSet>(found->sets[i]));
  }
  loaded.store(library, std::memory_order_release);
  return library;
}

}  // namespace attn_dispatch
