// The functions with which tests control the emulator. Their effect is process-wide.
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

// Sets the architecture, at first "gfx942". The emulator differs by architecture where dev18 does.
void attn_emulator_set_arch(const char* arch);

// Sets the generation of AITER, at first "dev18": how lengths of packed sequences are given.
void attn_emulator_set_generation(const char* generation);

// Makes attn_dispatch_aiter() return the table of another AITER, of generation "v0.1.15", or again
// the first.
void attn_emulator_offer_newer(int offers);

// Sets the answer of *_takes_asm: 0 or 1, or -1 for the use_asm of the call.
void attn_emulator_set_asm_answer(int answer);

// Makes the next call to HIP or AITER fail with this message.
void attn_emulator_fail_next(const char* message);

// The number of calls of an AttnEmulatorCall `kind`, including those that failed.
int64_t attn_emulator_calls(int kind);

// Copies the struct of the last call of this kind and returns 1; returns 0 if there was none or
// `size` is not the struct's.
int attn_emulator_last_call(int kind, void* into, int64_t size);

// Whether dropout keeps this pair: 1 or 0.
int attn_emulator_keep(uint64_t seed, uint64_t offset, int32_t sequence, int32_t head, int32_t row,
                       int32_t col, float rate);

// A test's function that serves calls in place of the emulator's computations. It gets the kind,
// the struct, and the place for the sentence of a failure, and returns 0, 1 after a failure, or -1
// to leave the call to the emulator. Null: the emulator computes all.
typedef int (*AttnEmulatorServer)(int kind, const void* call, char* message, int32_t size);
void attn_emulator_set_server(AttnEmulatorServer server);

// The start and the bytes of buffer number n that was noted on this thread, or 0 past the last.
int attn_emulator_noted_buffer(int n, uint64_t* start, int64_t* bytes);

// Resets everything to how it was when the library was loaded.
void attn_emulator_reset(void);

#ifdef __cplusplus
}
#endif
