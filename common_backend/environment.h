// Environment variables that are read in C++. Those that Python reads are in settings.py.
#pragma once

#include <cstdlib>
#include <string>

#include "status.h"

namespace attn_dispatch {

// Whether an environment variable is 1; not where it is unset, empty or 0, and anything else is an
// error.
inline Result<bool> environment_flag(const char* name) {
  const char* value = std::getenv(name);
  const std::string text = value ? value : "";
  if (text == "1") return true;
  if (text.empty() || text == "0") return false;
  return Status{Code::kWrongCall, std::string(name) + ": expected 0 or 1, got '" + text + "'"};
}

// Whether results and scratch memory are filled with NaN before each call, so that whatever a
// kernel leaves unwritten or reads uninitialized shows. Tests set it.
inline Result<bool> poisons() { return environment_flag("ATTN_DISPATCH_POISON"); }

}  // namespace attn_dispatch
