// Clears padding rows of results. Kernels leave rows that attend to nothing unwritten, or write
// NaN, and they must be 0. Rows with invalid lengths or segment ids must be NaN.
#pragma once

#include <cstddef>
#include <cstdint>

#include "library.h"
#include "status.h"

namespace attn_dispatch {

// The bytes of a row, and the address of the first, must be multiples of this.
inline constexpr int64_t kRowMultiple = 16;

// The arrays that one kernel clears at most.
inline constexpr size_t kMostArrays = 4;

// An array [count, row_bytes] and the flag (uint8) of each row. The kernel reads it as it is here.
struct FlaggedRows {
  void* rows;
  const void* flags;
  int64_t row_bytes;
  int64_t count;
};

// Loads the kernel on the current device. Must not be called inside a stream capture.
Status load_clear_rows(int32_t device_ordinal);

// Queues a kernel that sets row i of each of the `number` arrays to 0 if flags[i] is 0, leaves it
// if that is 1, and sets it to NaN (all bits 1, in every floating-point format) if that is 2. Rows
// that are left are not touched, so the call takes microseconds, not the time to write the arrays.
// Rows that are not multiples of kRowMultiple, too many of them, or too many arrays, are a wrong
// call.
Status clear_rows(const FlaggedRows* arrays, size_t number, int32_t device_ordinal,
                  cudaStream_t stream);

}  // namespace attn_dispatch
