// Clears the rows past the last packed sequence, which kernels leave unwritten, by the offsets that
// the kernels were given. The rows need no flags.
#pragma once

#include <cstddef>
#include <cstdint>

#include "library.h"
#include "status.h"

namespace attn_dispatch {

// The arrays that one kernel clears at most.
inline constexpr size_t kMostEnds = 4;

// Arrays [times, rows, row_words] of 32-bit words. Rows from offsets[last] on become `padding`. If
// offsets[0] is above 0, the rows before it become `invalid`, and no others are touched: wrong
// offsets are that way. The kernel reads this as it is here.
struct EndsToClear {
  void* words;
  const void* offsets;  // int32
  int64_t last;
  int64_t row_words;
  int64_t rows;
  int64_t times;
  uint32_t padding;
  uint32_t invalid;
};

// Loads the kernel on the current device. Must not be called inside a stream capture.
Status load_clear_ends(int32_t device_ordinal);

// Queues the kernel for `number` arrays. It writes nothing outside of them, whatever offsets hold.
Status clear_ends(const EndsToClear* arrays, size_t number, int32_t device_ordinal,
                  cudaStream_t stream);

}  // namespace attn_dispatch
