// What tests can ask of the emulator and make it do. The hooks are process-wide.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum AttnEmulatorCall {
  ATTN_EMULATOR_FORWARD = 0,
  ATTN_EMULATOR_BACKWARD = 1,
  ATTN_EMULATOR_MEMSET = 2,
  ATTN_EMULATOR_SPLIT_KV = 3,
};

// The architecture that it says it is; "gfx942" at first. Where dev18 differs by architecture, so
// does the emulator.
void attn_emulator_set_arch(const char* arch);

// What *_takes_asm answers: 0 or 1, or -1 for what the call itself says in use_asm.
void attn_emulator_set_asm_answer(int answer);

// The next call to HIP or AITER fails with this message.
void attn_emulator_fail_next(const char* message);

// How often AttnEmulatorCall `kind` was called, failures included.
int64_t attn_emulator_calls(int kind);

// Copies the last struct of this kind of call. Returns 1, or 0 where there was
// none or `size` is not the struct's.
int attn_emulator_last_call(int kind, void* into, int64_t size);

// Whether dropout keeps this pair: 1 or 0.
int attn_emulator_keep(uint64_t seed, uint64_t offset, int32_t sequence, int32_t head, int32_t row,
                       int32_t col, float rate);

// Back to how it was loaded.
void attn_emulator_reset(void);

#ifdef __cplusplus
}
#endif
