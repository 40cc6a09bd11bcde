// The forward-mode derivative of a call: the tangents of out and lse, by one kernel.
#pragma once

#include <vector>

#include "calls.h"

namespace attn_dispatch {

// clang-format off
// The arrays, in this order. Each tangent is of the shape and type of its array.
//
//   q, k, v, q_tangent, k_tangent, v_tangent, out, lse, LISTS, MASK -> out_tangent, lse_tangent
//
// LISTS and MASK are those of calls.h, with a line for each tile of query rows.
// clang-format on

// Loads the kernel on the current device. Must not be called inside a stream capture.
Status load_tangent(CompiledSet& set, CallKind kind, int32_t ordinal);

// Checks every array against what the kernel touches, then queues it. With `poisons`, results are
// filled with NaN before.
Status run_tangent(const CompiledSet& set, CallKind kind, float scale,
                   const std::vector<Array>& operands, const std::vector<Array>& results,
                   bool poisons, cudaStream_t stream);

}  // namespace attn_dispatch
