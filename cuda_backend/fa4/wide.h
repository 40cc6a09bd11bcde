// Calls with head dims beyond 256, by kernels that read no mask.
#pragma once

#include <vector>

#include "calls.h"

namespace attn_dispatch {

// clang-format off
// The arrays, in this order. H is any multiple of 8 up to the set's head dim.
//
//   forward   q [B, T, N, H], k, v [B, S, K, H] -> out [B, T, N, H], lse [B, N, R]
//   backward  q, k, v, out_grad [B, T, N, H], lse2 and products [B, N, R'] -> dq, dk, dv
//
// Queries see the first `keys` of the keys; others get gradients of 0. In a causal call the last
// query sees all of these, and each one before it a key less. R is the number of queries that see a
// key, the last ones; the others have out and dq of 0. R' is R rounded up to backward_tile_m; lse2
// and products are those of fa4_library.h. The numbers are float32.
// clang-format on

// The kernels of a pass, loaded on the current device. Must not be called inside a stream capture.
Status load_wide(CompiledSet& set, CallKind kind, Pass pass, int32_t ordinal);

// Checks every array against what the kernels touch, then queues the pass. With `poisons`, results
// are filled with NaN before.
Status run_wide_forward(const CompiledSet& set, CallKind kind, float scale,
                        const std::vector<Array>& operands, const std::vector<Array>& results,
                        bool poisons, cudaStream_t stream);
Status run_wide_backward(const CompiledSet& set, CallKind kind, float scale,
                         const std::vector<Array>& operands, const std::vector<Array>& results,
                         bool poisons, cudaStream_t stream);

}  // namespace attn_dispatch
