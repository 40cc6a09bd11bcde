// The libraries that serve aiter_api.h, one for each architecture, found once per process.
#pragma once

#include <hip/hip_runtime_api.h>

#include <string>
#include <string_view>

#include "aiter_api.h"
#include "status.h"

namespace attn_dispatch {

// What the handlers need of HIP. It comes from the HIP that AITER's library is linked with: this
// one is linked with none, so that it is the same for every version of ROCm.
struct Hip {
  decltype(&hipMemsetAsync) memset_async;
  decltype(&hipGetErrorString) error_string;
  decltype(&hipGetLastError) get_last_error;
};

struct Aiter {
  const AttnAiter* calls;
  Hip hip;
};

// Loads from this file the library for this architecture ("gfx942"). The first one stays.
Status load_aiter(const std::string& path, const std::string& arch);

// The library loaded for this architecture, for good, or null.
const Aiter* aiter(std::string_view arch);

}  // namespace attn_dispatch
