// Exports internals of the emulator for its tests.
#include "export.h"
#include "numbers.h"

// The sizes of the structs, which native.py parses from aiter_api.h.
ATTN_EXPORT int64_t selftest_forward_size(void) { return sizeof(AttnAiterForward); }
ATTN_EXPORT int64_t selftest_backward_size(void) { return sizeof(AttnAiterBackward); }

ATTN_EXPORT int64_t selftest_split_kv_size(void) { return sizeof(AttnAiterSplitKv); }

ATTN_EXPORT float selftest_load(uint16_t bits, int32_t dtype) {
  return attn_emulator::load(&bits, 0, dtype);
}

ATTN_EXPORT uint16_t selftest_store(float x, int32_t dtype, int rounding) {
  uint16_t bits;
  attn_emulator::store(&bits, 0, x, dtype, rounding);
  return bits;
}
