// What runs behind attn_dispatch_aiter(): cpu.cc, or cuda/emulator.cu.
#pragma once

#include <string>

#include "aiter_api.h"

namespace attn_emulator {

// Runs or queues the call. An empty string, or why not.
std::string run(const AttnAiterForward& forward, void* stream);
std::string run(const AttnAiterBackward& backward, void* stream);
std::string run(const AttnAiterSplitKv& split, void* stream);

}  // namespace attn_emulator
