// The calls that some version of cuDNN plans or runs wrongly. They are refused before every
// planning, so that neither a probe nor a program that was lowered elsewhere reaches the bug.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "spec.h"

namespace attn_dispatch {

// A sentence, with its source, for every known bug that this call would run into. `sm` is the
// compute capability, major * 10 + minor.
std::vector<std::string> known_bad_reasons(const SdpaSpec& spec, int64_t version, int64_t sm);

}  // namespace attn_dispatch
