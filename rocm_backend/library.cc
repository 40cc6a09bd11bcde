#include "library.h"

#include <dlfcn.h>

#include <atomic>
#include <mutex>

namespace attn_dispatch {
namespace {

// AITER's C++ interface changes from release to release; aiter_adapter*.cc is written for this one.
constexpr char kGeneration[] = "dev18";

std::atomic<const AttnAiter*> loaded{nullptr};
Hip loaded_hip{};

// False where the library and those that it needs have no HIP.
bool find_hip(void* library, Hip& hip) {
#ifdef __HIP_PLATFORM_NVIDIA__  // there HIP is a header
  hip = {&hipMemsetAsync, &hipGetErrorString};
#else
  hip = {reinterpret_cast<decltype(hip.memset_async)>(dlsym(library, "hipMemsetAsync")),
         reinterpret_cast<decltype(hip.error_string)>(dlsym(library, "hipGetErrorString"))};
#endif
  return hip.memset_async && hip.error_string;
}

}  // namespace

std::string load_aiter(const std::string& path) {
  if (aiter()) return "";
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    const char* why = dlerror();
    return "AITER's library cannot be loaded: " + std::string(why ? why : path) +
           "; build it with `attn-dispatch build-aiter`";
  }
  using Entry = const AttnAiter* (*)();
  auto entry = reinterpret_cast<Entry>(dlsym(library, "attn_dispatch_aiter"));
  if (!entry) {
    return path + " does not export attn_dispatch_aiter: it was not built by " +
           "`attn-dispatch build-aiter`";
  }
  const AttnAiter* found = entry();
  if (found->api_version != ATTN_AITER_API_VERSION) {
    return path + " was built for version " + std::to_string(found->api_version) +
           " of attn_dispatch's AITER interface and this is version " +
           std::to_string(ATTN_AITER_API_VERSION) +
           "; build it again with `attn-dispatch build-aiter`";
  }
  if (found->generation != std::string(kGeneration)) {
    return path + " was built from AITER's generation " + found->generation +
           " and this attn_dispatch works with " + kGeneration +
           "; build it again with `attn-dispatch build-aiter`";
  }
  static std::mutex one_at_a_time;
  std::lock_guard<std::mutex> lock(one_at_a_time);
  if (aiter()) return "";
  if (!find_hip(library, loaded_hip)) {
    return path + " is not linked with HIP (libamdhip64): it was not built by " +
           "`attn-dispatch build-aiter`";
  }
  loaded.store(found);
  return "";
}

const AttnAiter* aiter() { return loaded.load(); }

const Hip& hip() { return loaded_hip; }

}  // namespace attn_dispatch
