// Rows that attend nothing: kernels leave them unwritten, or write NaN, and they must be 0; or NaN
// where what they may attend has been said wrongly.
#pragma once

#include <cstdint>

#include "library.h"
#include "status.h"

namespace attn_dispatch {

// What the bytes of a row, and the address of the first, are a multiple of.
inline constexpr int64_t kRowMultiple = 16;

// Makes the kernel ready on the current device. Not inside a stream capture.
Status load_clear_rows(int32_t device_ordinal);

// Queues: row i of `rows` [count, row_bytes] becomes 0 where flags[i] (uint8) is 0, stays where it
// is 1, and becomes NaN (all bits 1, in every format of floating numbers) where it is 2.
// A wrong call where rows are not multiples of kRowMultiple, or are too many. A row that stays is
// not touched, so it costs a few microseconds, not the time to write the array.
Status clear_rows(void* rows, const void* flags, int64_t count, int64_t row_bytes,
                  int32_t device_ordinal, cudaStream_t stream);

}  // namespace attn_dispatch
