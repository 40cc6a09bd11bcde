#include "library.h"

#include <dlfcn.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <mutex>

#include "spec.h"

namespace attn_dispatch {
namespace {

constexpr char kRemedy[] = "build it again with `attn-dispatch build-aiter`";

// Leaked on purpose: threads may outlive static destruction.
struct Libraries {
  std::mutex mutex;
  std::multimap<std::string, Aiter, std::less<>> by_arch;

  const Aiter* find(std::string_view arch, std::string_view generation) const {
    const auto [first, last] = by_arch.equal_range(arch);
    for (auto entry = first; entry != last; ++entry) {
      if (entry->second.calls->generation == generation) return &entry->second;
    }
    return nullptr;
  }
};

Libraries& libraries() {
  static auto* instance = new Libraries;
  return *instance;
}

// Finds HIP's functions in the library, or in those with which it is linked; false if there are
// none.
bool find_hip(void* library, Hip& hip) {
#ifdef __HIP_PLATFORM_NVIDIA__  // where HIP is headers over CUDA
  hip = {&hipMemsetAsync, &hipGetErrorString, &hipGetLastError};
#else
  hip = {reinterpret_cast<decltype(hip.memset_async)>(dlsym(library, "hipMemsetAsync")),
         reinterpret_cast<decltype(hip.error_string)>(dlsym(library, "hipGetErrorString")),
         reinterpret_cast<decltype(hip.get_last_error)>(dlsym(library, "hipGetLastError"))};
#endif
  return hip.memset_async && hip.error_string && hip.get_last_error;
}

Result<Aiter> open(const std::string& path, const std::string& arch) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  const auto failure = [library](const std::string& sentence) -> Status {
    // Close it: dlopen returns an open library again, even if the file at its path is replaced.
    if (library) dlclose(library);
    return {Code::kLibrary, sentence};
  };
  if (!library) {
    const char* why = dlerror();
    return failure("AITER's library cannot be loaded: " + std::string(why ? why : path) +
                   "; build it with `attn-dispatch build-aiter`");
  }
  using Entry = const AttnAiter* (*)();
  auto entry = reinterpret_cast<Entry>(dlsym(library, "attn_dispatch_aiter"));
  if (!entry) {
    return failure(path + " does not export attn_dispatch_aiter: it was not built by " +
                   "`attn-dispatch build-aiter`");
  }
  const AttnAiter* calls = entry();
  if (calls->api_version != ATTN_AITER_API_VERSION) {
    return failure(path + " was built for version " + std::to_string(calls->api_version) +
                   " of attn_dispatch's AITER interface and this is version " +
                   std::to_string(ATTN_AITER_API_VERSION) + "; " + kRemedy);
  }
  if (std::find(std::begin(kGenerations), std::end(kGenerations), calls->generation) ==
      std::end(kGenerations)) {
    return failure(path + " was built from AITER's generation " + calls->generation +
                   " and this attn_dispatch works with dev18 and v0.1.15; " + kRemedy);
  }
  if (calls->arch && calls->arch != arch) {
    return failure(path + " is AITER for " + calls->arch + ", and this is " + arch +
                   "; build it with `attn-dispatch build-aiter --arch " + arch + "`");
  }
  Aiter found{calls, {}};
  if (!find_hip(library, found.hip)) {
    return failure(path + " is not linked with HIP (libamdhip64): it was not built by " +
                   "`attn-dispatch build-aiter`");
  }
  return found;
}

}  // namespace

Status load_aiter(const std::string& path, const std::string& arch) {
  const Result<Aiter> found = open(path, arch);
  if (!found.ok()) return found.status;
  std::lock_guard<std::mutex> lock(libraries().mutex);
  if (!libraries().find(arch, found.value.calls->generation)) {
    libraries().by_arch.emplace(arch, found.value);
  }
  return {};
}

const Aiter* loaded_aiter(std::string_view arch, std::string_view generation) {
  std::lock_guard<std::mutex> lock(libraries().mutex);
  return libraries().find(arch, generation);
}

std::string loaded_generations(std::string_view arch) {
  std::lock_guard<std::mutex> lock(libraries().mutex);
  std::string names;
  const auto [first, last] = libraries().by_arch.equal_range(arch);
  for (auto entry = first; entry != last; ++entry) {
    names += (names.empty() ? "" : " and ") + std::string(entry->second.calls->generation);
  }
  return names;
}

}  // namespace attn_dispatch
