// Notes how large the buffers of the next call are. aiter_api.h has pointers and strides only, so a
// call with a stride that is too large would read other memory unnoticed; the emulator compares
// every array with the buffers noted here. Notes are kept by thread, and dropped after each call of
// AITER.
//
// rocm_backend calls this if it is built with -DATTN_DISPATCH_NOTE_BUFFER=attn_emulator_note_buffer
// and this file force-included.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

void attn_emulator_note_buffer(const void* start, int64_t bytes);
void attn_emulator_clear_buffers(void);

#ifdef __cplusplus
}
#endif
