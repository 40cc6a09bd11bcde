// The libraries that serve aiter_api.h: one for each architecture and generation of AITER, loaded
// once per process.
#pragma once

#include <hip/hip_runtime_api.h>

#include <string>
#include <string_view>

#include "aiter_api.h"
#include "status.h"

namespace attn_dispatch {

// The functions of HIP that the handlers call. They come from the HIP with which AITER's library is
// linked. _rocm itself is linked with none, so that one build serves every version of ROCm.
struct Hip {
  decltype(&hipMemsetAsync) memset_async;
  decltype(&hipGetErrorString) error_string;
  decltype(&hipGetLastError) get_last_error;
};

struct Aiter {
  const AttnAiter* calls;
  Hip hip;
};

// Loads a library for an architecture ("gfx942") from `path`, which Python has judged
// (devices/code_files.py). The first of its generation stays:
// another of the same generation changes nothing.
Status load_aiter(const std::string& path, const std::string& arch);

// The library that was loaded for this architecture and generation, or null. It is never unloaded.
const Aiter* loaded_aiter(std::string_view arch, std::string_view generation);

// The generations that are loaded for this architecture, for messages; empty if there are none.
std::string loaded_generations(std::string_view arch);

}  // namespace attn_dispatch
