// The library that serves aiter_api.h, found once per process.
#pragma once

#include <hip/hip_runtime_api.h>

#include <string>

#include "aiter_api.h"

namespace attn_dispatch {

// Loads it from this file. Returns an empty sentence, or why it cannot be used. The first library
// that loads stays.
std::string load_aiter(const std::string& path);

// The loaded library, or null.
const AttnAiter* aiter();

// What the handlers need of HIP. It comes from the HIP that AITER's library is linked with: this
// one is linked with none, so that it is the same for every version of ROCm.
struct Hip {
  decltype(&hipMemsetAsync) memset_async;
  decltype(&hipGetErrorString) error_string;
};

// Of the loaded library; not before there is one.
const Hip& hip();

}  // namespace attn_dispatch
