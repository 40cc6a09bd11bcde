// Clears padding rows of results. Kernels leave rows that attend to nothing unwritten, or write
// NaN, and they must be 0. Rows with invalid lengths or segment ids must be NaN.
#pragma once

#include <cstdint>

#include "library.h"
#include "status.h"

namespace attn_dispatch {

// The bytes of a row, and the address of the first, must be multiples of this.
inline constexpr int64_t kRowMultiple = 16;

// Loads the kernel on the current device. Must not be called inside a stream capture.
Status load_clear_rows(int32_t device_ordinal);

// Queues a kernel that sets row i of `rows` [count, row_bytes] to 0 if flags[i] (uint8) is 0,
// leaves it if that is 1, and sets it to NaN (all bits 1, in every floating-point format) if that
// is 2. Rows that are left are not touched, so the call takes microseconds, not the time to write
// the array. Rows that are not multiples of kRowMultiple, or too many, are a wrong call.
Status clear_rows(void* rows, const void* flags, int64_t count, int64_t row_bytes,
                  int32_t device_ordinal, cudaStream_t stream);

}  // namespace attn_dispatch
