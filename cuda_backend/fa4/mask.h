// A call's mask as kernels take it: the lists of tiles, and rows or bits (calls.h).
#pragma once

#include <cstdint>
#include <vector>

#include "compiled_kernels.h"
#include "extents.h"

namespace attn_dispatch {

// The lists. The mask follows them.
constexpr size_t kLists = 4;

inline int64_t tiles_of(int64_t length, int64_t tile) { return (length + tile - 1) / tile; }

// What an array has on an axis that may be shared: 1, or else all.
int64_t shared_or(int64_t all, const Array& array, size_t axis);

// Checks the lists of `lines` tiles, each of at most `most` others, and the mask behind them.
Status check_mask(const std::vector<Array>& operands, size_t first, MaskForm form, int64_t lines,
                  int64_t most, const Extents& e);

// The lists and the rows or bits of a mask, in the kernels' terms.
struct Mask {
  AttnFa4Counts partial_counts;
  AttnFa4Indices partial_indices;
  AttnFa4Counts full_counts;
  AttnFa4Indices full_indices;
  union {
    AttnFa4Rows rows;
    AttnFa4Bits bits;
  } data;
};

// The mask of operands that are checked, from the lists on.
Mask mask_of(const std::vector<Array>& operands, size_t first, MaskForm form, const Extents& e);

}  // namespace attn_dispatch
