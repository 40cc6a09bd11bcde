// How large the buffers of the coming call are. aiter_api.h carries pointers and strides only, so a
// stride that is too large reads a neighbour's memory and nobody notices; the emulator compares
// what a call implies with what is noted here. By thread, and forgotten after each AITER call.
//
// Built into rocm_backend with -DATTN_DISPATCH_NOTE_BUFFER=attn_emulator_note_buffer and this file
// force-included.
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
