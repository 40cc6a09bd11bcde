// The emulator's side of emulator_buffers.h.
#pragma once

#include "emulator_buffers.h"

namespace attn_emulator {

// Bytes from `address` to the end of the noted buffer that holds it; -1 if none does, and as good
// as infinite if none was noted on this thread.
int64_t noted_bytes_from(const void* address);

}  // namespace attn_emulator
