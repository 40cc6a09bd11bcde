#include "mask.h"

#include <array>

#include "layout.h"
#include "wrong_value.h"

namespace attn_dispatch {
namespace {

constexpr int64_t kWordBits = 32;

}  // namespace

int64_t shared_or(int64_t all, const Array& array, size_t axis) {
  return array.shape.size() > axis && array.shape[axis] == 1 ? 1 : all;
}

Status check_mask(const std::vector<Array>& operands, size_t first, MaskForm form, int64_t lines,
                  int64_t most, const Extents& e) {
  constexpr std::array<const char*, kLists> kNames = {"partial_counts", "partial_indices",
                                                      "full_counts", "full_indices"};
  constexpr std::array<const char*, 2> kEntries = {"partial_indices, entries of a line",
                                                   "full_indices, entries of a line"};
  for (size_t i = 0; i < kLists; ++i) {
    const Array& array = operands[first + i];
    const int64_t batch = shared_or(e.batch, array, 0), heads = shared_or(e.heads, array, 1);
    Shape shape = {batch, heads, lines};
    if (i % 2 == 1) {
      const int64_t width = array.shape.size() == 4 ? array.shape[3] : 0;
      ATTN_RETURN_IF_ERROR(check_extent(kEntries[i / 2], width, most));
      shape = {batch, heads, lines, width};
    }
    ATTN_RETURN_IF_ERROR(check_array(array, {kNames[i], ElementType::kInt32, shape, kNumber}));
  }
  const Array& mask = operands[first + kLists];
  const int64_t batch = shared_or(e.batch, mask, 0);
  if (form == MaskForm::kRows) {
    return check_array(mask, {"rows", ElementType::kInt32, {batch, e.rows, 4}, kVector});
  }
  const int64_t heads = shared_or(e.heads, mask, 1), words = tiles_of(e.keys, kWordBits);
  return check_array(mask, {"bits", ElementType::kUInt32, {batch, heads, e.rows, words}, kNumber});
}

Mask mask_of(const std::vector<Array>& operands, size_t first, MaskForm form, const Extents& e) {
  const auto batch = static_cast<int32_t>(e.batch), heads = static_cast<int32_t>(e.heads);
  Mask mask = {as_counts(operands[first], batch, heads),
               as_indices(operands[first + 1], batch, heads),
               as_counts(operands[first + 2], batch, heads),
               as_indices(operands[first + 3], batch, heads),
               {}};
  const Array& data = operands[first + kLists];
  if (form == MaskForm::kRows) {
    mask.data.rows = as_rows(data, batch);
  } else {
    mask.data.bits = as_bits(data, batch, heads);
  }
  return mask;
}

}  // namespace attn_dispatch
