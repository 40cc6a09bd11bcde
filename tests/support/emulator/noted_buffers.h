// The emulator's access to the buffers noted by emulator_buffers.h.
#pragma once

#include "emulator_buffers.h"

namespace attn_emulator {

// The bytes from `address` to the end of the noted buffer that it is in: -1 if it is in none, and
// the largest number if none was noted on this thread.
int64_t noted_bytes_from(const void* address);

}  // namespace attn_emulator
