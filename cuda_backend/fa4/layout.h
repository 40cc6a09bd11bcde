// Arrays as the kernels' host functions take them (fa4_library.h).
#pragma once

#include "arrays.h"
#include "fa4_library.h"

namespace attn_dispatch {

inline int32_t extent(const Array& array, size_t axis) {
  return static_cast<int32_t>(array.shape[axis]);
}

// The stride of an axis of a dense array, in elements; 0 for an axis of one entry that stands for
// all entries of the call's.
inline int64_t stride(const Array& array, size_t axis) {
  int64_t result = 1;
  for (size_t i = axis + 1; i < array.shape.size(); ++i) result *= array.shape[i];
  return result;
}

inline int64_t broadcast_stride(const Array& array, size_t axis) {
  return array.shape[axis] == 1 ? 0 : stride(array, axis);
}

inline AttnFa4Heads as_heads(const Array& array) {
  return {array.data,
          {extent(array, 0), extent(array, 1), extent(array, 2)},
          {stride(array, 0), stride(array, 1)}};
}

inline AttnFa4Numbers as_numbers(const Array& array) {
  return {array.data,
          {extent(array, 0), extent(array, 1), extent(array, 2)},
          {stride(array, 0), stride(array, 1)}};
}

inline AttnFa4Counts as_counts(const Array& array, int32_t batch, int32_t heads) {
  return {array.data,
          {batch, heads, extent(array, 2)},
          {broadcast_stride(array, 0), broadcast_stride(array, 1)}};
}

inline AttnFa4Indices as_indices(const Array& array, int32_t batch, int32_t heads) {
  return {array.data,
          {batch, heads, extent(array, 2), extent(array, 3)},
          {broadcast_stride(array, 0), broadcast_stride(array, 1), stride(array, 2)}};
}

inline AttnFa4Rows as_rows(const Array& array, int32_t batch) {
  return {array.data, {batch, extent(array, 1)}, {broadcast_stride(array, 0)}};
}

inline AttnFa4Bits as_bits(const Array& array, int32_t batch, int32_t heads) {
  return {array.data,
          {batch, heads, extent(array, 2), extent(array, 3)},
          {broadcast_stride(array, 0), broadcast_stride(array, 1), stride(array, 2)}};
}

inline AttnFa4Sinks as_sinks(const Array& array, int32_t batch) {
  return {array.data, {batch, extent(array, 1)}, {broadcast_stride(array, 0)}};
}

}  // namespace attn_dispatch
