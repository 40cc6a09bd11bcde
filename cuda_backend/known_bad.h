// Calls that some cuDNN version plans or runs wrongly. Asked before every planning, so that neither
// a probe nor a program lowered elsewhere reaches the bug.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "spec.h"

namespace attn_dispatch {

// A sentence, with its source, for every known bug that this call would meet; empty when none.
// `sm` is the compute capability as major * 10 + minor.
std::vector<std::string> known_bad_reasons(const SdpaSpec& spec, int64_t version, int64_t sm);

}  // namespace attn_dispatch
