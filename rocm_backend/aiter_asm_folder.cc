// Finds the ASM kernels beside the library that this file is part of, where `attn-dispatch
// build-aiter` puts them: hsa/gfx942 in the same folder if the library was built for gfx942.
#include <dlfcn.h>

#include <atomic>
#include <filesystem>

#include "aiter_environment.h"

#ifndef ATTN_DISPATCH_AITER_ARCH
#error "expected ATTN_DISPATCH_AITER_ARCH, the architecture that is built for, such as gfx942"
#endif
#define ATTN_TEXT(name) #name
#define ATTN_TEXT_OF(macro) ATTN_TEXT(macro)

namespace attn_dispatch::aiter_adapter {
namespace {

std::string Find() {
  namespace fs = std::filesystem;
  Dl_info found;
  if (dladdr(reinterpret_cast<const void*>(&AsmFolder), &found) == 0) return "";
  std::error_code failed;
  const fs::path library = fs::canonical(found.dli_fname, failed);
  if (failed) return "";
  return (library.parent_path() / "hsa" / ArchOfBuild()).string() + "/";
}

#ifdef ATTN_DISPATCH_AITER_ASM_ROOT
constexpr bool kVariableIsRoot = true;
#else
constexpr bool kVariableIsRoot = false;
#endif

}  // namespace

const char* ArchOfBuild() { return ATTN_TEXT_OF(ATTN_DISPATCH_AITER_ARCH); }

const std::string& AsmFolder() {
  static const std::string none;
  static std::atomic<const std::string*> known{nullptr};  // set once found; never freed
  if (const std::string* folder = known) return *folder;
  std::string folder = Find();
  if (folder.empty()) return none;
  const std::string* expected = nullptr;
  const auto* made = new std::string(std::move(folder));
  if (known.compare_exchange_strong(expected, made)) return *made;
  delete made;
  return *expected;
}

const std::string& AsmVariable() {
  const std::string& folder = AsmFolder();
  if (!kVariableIsRoot || folder.empty()) return folder;
  static const auto* root = new std::string(
      std::filesystem::path(folder).parent_path().parent_path().string());  // never freed
  return *root;
}

}  // namespace attn_dispatch::aiter_adapter
