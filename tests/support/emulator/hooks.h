// The state behind emulator.h.
#pragma once

#include <string>

#include "aiter_api.h"
#include "emulator.h"

namespace attn_emulator {

std::string arch();
int asm_answer(const AttnAiterCall& call);

// Counts a call; true, with the message, if this is the one that was told to fail.
bool must_fail(AttnEmulatorCall kind, std::string& message);
bool must_fail(std::string& message);  // a call that is not counted

void remember(const AttnAiterForward& forward);
void remember(const AttnAiterBackward& backward);
void remember(const AttnAiterSplitKv& split);

void write(const std::string& text, char* into, int32_t size);  // cut to fit

// A failure as aiter_api.h reports it: 1 and a sentence.
int failed(const std::string& sentence, char* message, int32_t size);

}  // namespace attn_emulator
