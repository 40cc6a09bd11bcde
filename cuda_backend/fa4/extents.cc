#include "extents.h"

#include <string>
#include <string_view>

#include "wrong_value.h"

namespace attn_dispatch {
namespace {

// Kernels count in 32 bits. Rounding a length up to a tile must not pass that.
constexpr int64_t kMostLength = kMostInt32 - 1024;

// The limit of a launch grid's second and third axes, which are heads and batch.
constexpr int64_t kMostBlocks = 65535;

Status check_from(const Array* arrays, const Expected* expected, size_t count) {
  for (size_t i = 0; i < count; ++i) ATTN_RETURN_IF_ERROR(check_array(arrays[i], expected[i]));
  return {};
}

}  // namespace

Status check_extent(const char* name, int64_t value, int64_t most) {
  if (value >= 1 && value <= most) return {};
  return wrong_value(name, "1 to " + std::to_string(most), value);
}

Status check_counts(const std::vector<Array>& arrays, size_t expected, const char* what) {
  if (arrays.size() == expected) return {};
  return wrong_value(what, std::to_string(expected), arrays.size());
}

Result<Extents> extents_of(const std::vector<Array>& operands) {
  for (const size_t i : {kQuery, kKey}) {
    if (const size_t rank = operands[i].shape.size(); rank != 4) {
      return wrong_value(i == kQuery ? "query" : "key", "4 axes", rank);
    }
  }
  const Shape& query = operands[kQuery].shape;
  const Shape& key = operands[kKey].shape;
  const Extents e{query[0], query[1], key[1], query[2], key[2]};
  ATTN_RETURN_IF_ERROR(check_extent("batch", e.batch, kMostBlocks));
  ATTN_RETURN_IF_ERROR(check_extent("query rows", e.rows, kMostLength));
  ATTN_RETURN_IF_ERROR(check_extent("keys", e.keys, kMostLength));
  ATTN_RETURN_IF_ERROR(check_extent("query heads", e.heads, kMostBlocks));
  ATTN_RETURN_IF_ERROR(check_extent("key heads", e.kv_heads, kMostBlocks));
  if (e.heads % e.kv_heads != 0) {
    return wrong_value("query heads", "a multiple of " + std::to_string(e.kv_heads) + " key heads",
                       e.heads);
  }
  return e;
}

ElementType type_of(const AttnFa4Set& set) {
  return std::string_view(set.dtype) == "float16" ? ElementType::kFloat16 : ElementType::kBFloat16;
}

Status check_all(const std::vector<Array>& arrays, size_t first,
                 std::initializer_list<Expected> expected) {
  return check_from(arrays.data() + first, expected.begin(), expected.size());
}

Status check_all(const std::vector<Array>& arrays, size_t first,
                 const std::vector<Expected>& expected) {
  return check_from(arrays.data() + first, expected.data(), expected.size());
}

Shapes shapes_of(const Extents& e, const AttnFa4Set& set) {
  return {{e.batch, e.rows, e.heads, set.head_dim},
          {e.batch, e.keys, e.kv_heads, set.head_dim},
          {e.batch, e.keys, e.kv_heads, set.head_dim_v},
          {e.batch, e.rows, e.heads, set.head_dim_v},
          {e.batch, e.heads, e.rows}};
}

}  // namespace attn_dispatch
