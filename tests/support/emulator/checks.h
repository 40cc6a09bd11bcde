// What the emulator refuses, each with a sentence; an empty string is a yes. A real kernel would
// not notice most of this: it would read or write what is not its own.
#pragma once

#include <string>
#include <vector>

#include "arrays.h"

namespace attn_emulator {

// Whether a 16-bit ASM kernel adds to dq itself: dev18 has the conversion from dq_acc only for
// gfx950 and head dims above 64. The caller must zero dq then.
bool is_direct(const AttnAiterBackward& backward, const std::string& arch);

// What contradicts itself or what dev18 has no kernel for. Follows no pointer.
std::string refusal(const AttnAiterForward& forward);
std::string refusal(const AttnAiterBackward& backward, const std::string& arch);
std::string refusal(const AttnAiterSplitKv& split);

// Whether arrays fit the buffers noted on this thread, if any are, and results overlap nothing.
std::string misfit(const std::vector<Array>& arrays);

// Group mode: whether the sequences lie in order inside the arrays. Reads seqstart_* and seqlen_*.
std::string wrong_sequences(const AttnAiterCall& call);

// Whether lengths and, as far as they reach, the page table stay inside the arrays. Reads both.
std::string wrong_pages(const AttnAiterSplitKv& split);

}  // namespace attn_emulator
