// The arrays of a call as axes with size and stride, to check sizes and overlaps and to fill
// results with NaN.
#pragma once

#include <vector>

#include "backward.h"
#include "forward.h"
#include "split_kv.h"

namespace attn_emulator {

struct Axis {
  int64_t size;
  int64_t stride;
};

constexpr int kMaxRank = 5;

enum class Access {
  kRead,
  kWritten,  // filled with NaN before the call
  kUpdated,  // added to or written in part: the caller initializes it
};

struct Array {
  const char* name;
  const void* start;
  int32_t element_bytes;
  Access access;
  Axis axes[kMaxRank];  // unused ones have size 1

  bool is_empty() const {
    for (const Axis& axis : axes) {
      if (axis.size <= 0) return true;
    }
    return false;
  }

  // The number of elements from `start` to the last one, inclusive.
  int64_t extent() const {
    if (is_empty()) return 0;
    int64_t last = 0;
    for (const Axis& axis : axes) last += (axis.size - 1) * axis.stride;
    return last + 1;
  }

  int64_t bytes() const { return extent() * element_bytes; }
};

// The arrays of one call, without those that are null.
std::vector<Array> arrays_of(const AttnAiterForward& forward);
std::vector<Array> arrays_of(const AttnAiterBackward& backward, bool is_direct);
std::vector<Array> arrays_of(const AttnAiterSplitKv& split);

}  // namespace attn_emulator
