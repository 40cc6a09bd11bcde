#include "check.h"

#include <algorithm>
#include <limits>
#include <string>

namespace attn_dispatch {
namespace {

constexpr int32_t kMostHeadDim = 256, kHeadDimMultiple = 8;
constexpr int32_t kPageMultiple = 128;  // CK's tiles of keys must not reach into the next page
// Workgroups along y and z of a grid. AITER ends the process where a launch of an ASM kernel fails.
constexpr int32_t kMostOfAGrid = 65535;
constexpr int32_t kQueriesOfATile = 128;  // of CK's forward kernels, where there are many queries

Status wrong(const std::string& name, const std::string& expected, int64_t got) {
  return {Code::kWrongCall, name + ": expected " + expected + ", got " + std::to_string(got)};
}

std::string at_most(int64_t most) { return "at most " + std::to_string(most); }

Status check_head_dim(const char* name, int32_t dim) {
  if (dim % kHeadDimMultiple == 0 && dim <= kMostHeadDim) return {};
  return wrong(std::string("head dim of ") + name, "a multiple of 8 up to 256", dim);
}

// Of one sequence, or of a batch row: the longest, and how long its array is.
Status check_longest(const AttnAiterCall& call, const char* name, int32_t longest, int32_t rows) {
  if (!call.is_group && longest != rows) return wrong(name, std::to_string(rows), longest);
  if (longest > rows) return wrong(name, at_most(rows) + ", the rows there are", longest);
  return {};
}

// Kernels add lengths to the sides of a window in 32 bits.
Status check_window(const AttnAiterCall& call, const char* name, int32_t side) {
  const int64_t lengths = int64_t{call.max_seq_len_q} + call.max_seq_len_kv;
  const int64_t most = std::numeric_limits<int32_t>::max() - lengths - 1;
  if (side <= most || side < 0) return {};
  return wrong(name, at_most(std::max<int64_t>(most, -1)) + " with sequences of these lengths",
               side);
}

Status check_grid(const std::string& what, int64_t number) {
  if (number <= kMostOfAGrid) return {};
  return wrong(what, at_most(kMostOfAGrid) + ", the workgroups of a grid along an axis", number);
}

Status check_shared(const AttnAiterCall& call) {
  if (call.num_heads % call.num_kv_heads != 0) {
    return wrong("heads of k", "a divisor of q's " + std::to_string(call.num_heads),
                 call.num_kv_heads);
  }
  ATTN_RETURN_IF_ERROR(check_head_dim("q", call.head_dim));
  ATTN_RETURN_IF_ERROR(check_head_dim("v", call.head_dim_v));
  ATTN_RETURN_IF_ERROR(check_longest(call, "max_seq_len_q", call.max_seq_len_q, call.seq_len_q));
  ATTN_RETURN_IF_ERROR(check_longest(call, "max_seq_len_kv", call.max_seq_len_kv, call.seq_len_kv));
  ATTN_RETURN_IF_ERROR(check_window(call, "window_left", call.window_left));
  ATTN_RETURN_IF_ERROR(check_window(call, "window_right", call.window_right));
  return check_grid(call.is_group ? "sequences" : "batch of q", call.batch);
}

}  // namespace

Status check(const AttnAiterForward& forward) {
  const AttnAiterCall& call = forward.call;
  ATTN_RETURN_IF_ERROR(check_shared(call));
  const int64_t tiles = (int64_t{call.max_seq_len_q} + kQueriesOfATile - 1) / kQueriesOfATile;
  return check_grid("tiles of 128 queries", tiles);
}

Status check(const AttnAiterBackward& backward) {
  ATTN_RETURN_IF_ERROR(check_shared(backward.call));
  // The rows of dq_acc are as wide as those of the kernels that there are.
  const int32_t dim = backward.call.head_dim;
  if (backward.accumulator == ATTN_AITER_ATOMIC_16 && dim > 128 && dim != 192) {
    return wrong("head dim of q", "at most 128, or 192, with accumulator atomic_16", dim);
  }
  return check_grid("heads of q", backward.call.num_heads);
}

Status check(const AttnAiterSplitKv& split) {
  ATTN_RETURN_IF_ERROR(check_shared(split.call));
  if (split.page_table && split.page_size % kPageMultiple != 0) {
    return wrong("keys in a page of k", "a multiple of 128", split.page_size);
  }
  return check_grid("heads of q", split.call.num_heads);
}

}  // namespace attn_dispatch
