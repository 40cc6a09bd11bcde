// The ASM kernels beside this very library: hsa/gfx942 in its folder, as `attn-dispatch
// build-aiter` leaves it. One build is for one architecture.
#include <dlfcn.h>

#include <filesystem>

#include "aiter_environment.h"

namespace attn_dispatch::aiter_adapter {
namespace {

std::string Find() {
  namespace fs = std::filesystem;
  Dl_info found;
  if (dladdr(reinterpret_cast<const void*>(&AsmFolder), &found) == 0) return "";
  std::error_code failed;
  const fs::path library = fs::canonical(found.dli_fname, failed);
  if (failed) return "";
  fs::directory_iterator folders(library.parent_path() / "hsa", failed);
  if (failed) return "";
  for (; folders != fs::directory_iterator(); folders.increment(failed)) {
    if (failed) return "";
    if (folders->is_directory(failed)) return folders->path().string() + "/";
  }
  return "";
}

}  // namespace

const std::string& AsmFolder() {
  static const std::string folder = Find();
  return folder;
}

}  // namespace attn_dispatch::aiter_adapter
