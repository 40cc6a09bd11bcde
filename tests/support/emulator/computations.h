// The computations behind attn_dispatch_aiter(), in cpu.cc or in cuda/emulator.cu.
#pragma once

#include <string>

#include "aiter_api.h"

namespace attn_emulator {

// Runs or queues the call. Returns an empty string, or the reason why it cannot.
std::string run(const AttnAiterForward& forward, void* stream);
std::string run(const AttnAiterBackward& backward, void* stream);
std::string run(const AttnAiterSplitKv& split, void* stream);

}  // namespace attn_emulator
