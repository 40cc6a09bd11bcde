// The state behind emulator.h.
#pragma once

#include <string>

#include "aiter_api.h"
#include "emulator.h"

namespace attn_emulator {

std::string arch();
std::string generation();
extern char generation_text[16];  // the first table of functions points to it
inline constexpr char kNewerGeneration[] = "v0.1.15";

// A scope in which this thread serves a call of the second table.
class NewerScope {
 public:
  NewerScope();
  ~NewerScope();
  NewerScope(const NewerScope&) = delete;
  NewerScope& operator=(const NewerScope&) = delete;
};

bool offers_newer();
int asm_answer(const AttnAiterCall& call);

// Counts the call, and returns true with the message if it is the one that must fail.
bool must_fail(AttnEmulatorCall kind, std::string& message);
bool must_fail(std::string& message);  // for a call that is not counted

// The function of a test's that serves calls, or null.
AttnEmulatorServer server();

void remember(const AttnAiterForward& forward);
void remember(const AttnAiterBackward& backward);
void remember(const AttnAiterSplitKv& split);

// Copies the text to `into`, cut to `size` bytes.
void write(const std::string& text, char* into, int32_t size);

// Writes the sentence of a failure and returns 1, as aiter_api.h has it.
int failed(const std::string& sentence, char* message, int32_t size);

}  // namespace attn_emulator
