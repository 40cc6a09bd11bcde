// The checks of the emulator. Each returns a sentence, or an empty string if nothing is wrong. A
// real kernel checks little of this, and would read or write outside of its arrays.
#pragma once

#include <string>
#include <vector>

#include "arrays.h"

namespace attn_emulator {

// Whether a 16-bit ASM kernel adds to dq itself, which the caller must zero then: dev18 converts
// dq_acc only on gfx950 and for head dims above 64.
bool is_direct(const AttnAiterBackward& backward, const std::string& arch);

// Refuses calls that contradict themselves or for which dev18 has no kernel. Follows no pointer.
std::string refusal(const AttnAiterForward& forward);
std::string refusal(const AttnAiterBackward& backward, const std::string& arch);
std::string refusal(const AttnAiterSplitKv& split);

// Refuses arrays that exceed the buffers noted on this thread, if there are any, and results that
// overlap another array.
std::string misfit(const std::vector<Array>& arrays);

// Refuses sequences, in group mode, that are not in order inside the arrays. Reads seqstart_* and
// seqlen_*.
std::string wrong_sequences(const AttnAiterCall& call);

// Refuses lengths, and entries of the page table within them, that are outside of the arrays. Reads
// both.
std::string wrong_pages(const AttnAiterSplitKv& split);

}  // namespace attn_emulator
