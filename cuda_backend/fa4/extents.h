// What the passes check alike: the extents of a call, and its arrays one by one.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <vector>

#include "arrays.h"
#include "fa4_library.h"
#include "status.h"

namespace attn_dispatch {

// Bytes to which the arrays are aligned that kernels read by TMA or in vectors, and the others.
constexpr int64_t kVector = 16, kNumber = 4;

constexpr int64_t kMostInt32 = (int64_t{1} << 31) - 1;

// The places of a pass's first operands.
enum Operand { kQuery, kKey, kValue };

// The extents of a call, read from query, key and value.
struct Extents {
  int64_t batch, rows, keys, heads, kv_heads;

  bool is_grouped() const { return heads != kv_heads; }
};

// The extents, if kernels can count them and heads are shared evenly.
Result<Extents> extents_of(const std::vector<Array>& operands);

// The shapes of arrays that every pass has.
struct Shapes {
  Shape query, key, value, out, lse;
};

Shapes shapes_of(const Extents& e, const AttnFa4Set& set);

// The type of a set's arrays of 16 bits.
ElementType type_of(const AttnFa4Set& set);

Status check_extent(const char* name, int64_t value, int64_t most);

// Compares a number of arrays; `what` they are is for the message.
Status check_counts(const std::vector<Array>& arrays, size_t expected, const char* what);

// Compares arrays one by one from `first` on, and stops at the first that is wrong.
Status check_all(const std::vector<Array>& arrays, size_t first,
                 std::initializer_list<Expected> expected);
Status check_all(const std::vector<Array>& arrays, size_t first,
                 const std::vector<Expected>& expected);

}  // namespace attn_dispatch
