#include "kernel_limits.h"

#include <algorithm>
#include <limits>
#include <string>

#include "wrong_value.h"

namespace attn_dispatch {
namespace {

constexpr int32_t kMostHeadDim = 256, kHeadDimMultiple = 8;
constexpr int32_t kPageMultiple = 128;  // a tile of keys must not reach into the next page
// Workgroups along y and z of a grid. AITER ends the process where the launch of an ASM kernel
// fails.
constexpr int32_t kMostWorkgroups = 65535;
constexpr int32_t kQueriesPerTile = 128;  // in CK's forward kernels for many queries

std::string at_most(int64_t most) { return "at most " + std::to_string(most); }

Status check_head_dim(const char* name, int32_t dim) {
  if (dim % kHeadDimMultiple == 0 && dim <= kMostHeadDim) return {};
  return wrong_value(std::string("head dim of ") + name, "a multiple of 8 up to 256", dim);
}

// `longest` is the length of the longest sequence, and `rows` how many rows the array has.
Status check_longest(const AttnAiterCall& call, const char* name, int32_t longest, int32_t rows) {
  if (!call.is_group && longest != rows) return wrong_value(name, std::to_string(rows), longest);
  if (longest > rows) return wrong_value(name, at_most(rows) + ", the rows there are", longest);
  return {};
}

// Kernels add lengths to the bounds of a window in 32 bits.
Status check_window(const AttnAiterCall& call, const char* name, int32_t bound) {
  const int64_t lengths = int64_t{call.max_seq_len_q} + call.max_seq_len_kv;
  const int64_t most = std::numeric_limits<int32_t>::max() - lengths - 1;
  if (bound <= most || bound < 0) return {};
  return wrong_value(
      name, at_most(std::max<int64_t>(most, -1)) + " with sequences of these lengths", bound);
}

Status check_grid(const std::string& name, int64_t workgroups) {
  if (workgroups <= kMostWorkgroups) return {};
  return wrong_value(
      name, at_most(kMostWorkgroups) + ", the most workgroups along an axis of a grid", workgroups);
}

Status check_shared(const AttnAiterCall& call) {
  if (call.num_heads % call.num_kv_heads != 0) {
    return wrong_value("heads of k", "a divisor of q's " + std::to_string(call.num_heads),
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

Status check_limits(const AttnAiterForward& forward) {
  const AttnAiterCall& call = forward.call;
  ATTN_RETURN_IF_ERROR(check_shared(call));
  const int64_t tiles = (int64_t{call.max_seq_len_q} + kQueriesPerTile - 1) / kQueriesPerTile;
  return check_grid("tiles of 128 queries", tiles);
}

Status check_limits(const AttnAiterBackward& backward) {
  const AttnAiterCall& call = backward.call;
  ATTN_RETURN_IF_ERROR(check_shared(call));
  if (call.use_asm && call.is_group && call.window_left >= 0) {
    return wrong_value("window_left", "-1 in a packed backward pass by ASM", call.window_left);
  }
  if (call.use_asm && call.is_group && call.window_right > 0) {
    return wrong_value("window_right", "-1 or 0 in a packed backward pass by ASM",
                       call.window_right);
  }
  // Only these kernels exist: the rows of dq_acc are 128 or 192 wide.
  const int32_t dim = call.head_dim;
  if (backward.accumulator == ATTN_AITER_ATOMIC_16 && dim > 128 && dim != 192) {
    return wrong_value("head dim of q", "at most 128, or 192, with accumulator atomic_16", dim);
  }
  return check_grid("heads of q", call.num_heads);
}

Status check_limits(const AttnAiterSplitKv& split) {
  ATTN_RETURN_IF_ERROR(check_shared(split.call));
  if (split.page_table && split.page_size % kPageMultiple != 0) {
    return wrong_value("keys in a page of k", "a multiple of 128", split.page_size);
  }
  return check_grid("heads of q", split.call.num_heads);
}

}  // namespace attn_dispatch
