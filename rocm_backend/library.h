// The library that serves aiter_api.h, found once per process.
#pragma once

#include <string>

#include "aiter_api.h"

namespace attn_dispatch {

// Loads it from this file. Returns an empty sentence, or why it cannot be used. The first library
// that loads stays.
std::string load_aiter(const std::string& path);

// The loaded library, or null.
const AttnAiter* aiter();

}  // namespace attn_dispatch
