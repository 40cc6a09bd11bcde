// The environment variables that C++ reads. Those that Python reads are in settings.py.
#pragma once

#include <cstdlib>
#include <string>

#include "status.h"

namespace attn_dispatch {

// True if the variable is 1, false if it is unset, empty or 0. Any other value is an error.
inline Result<bool> environment_flag(const char* name) {
  const char* value = std::getenv(name);
  const std::string text = value ? value : "";
  if (text == "1") return true;
  if (text.empty() || text == "0") return false;
  return Status{Code::kWrongCall, std::string(name) + ": expected 0 or 1, got '" + text + "'"};
}

// Whether to fill results and scratch memory with NaN before each call. Tests set this, so that
// what a kernel leaves unwritten or reads uninitialized shows in the results.
inline Result<bool> poison_requested() { return environment_flag("ATTN_DISPATCH_POISON"); }

}  // namespace attn_dispatch
