// One pass over a call: its arrays, checked and in the kernels' terms, and its launches.
#pragma once

#include <cstdint>
#include <vector>

#include "arrays.h"
#include "compiled_kernels.h"
#include "status.h"

namespace attn_dispatch {

// A tangent is a call's forward-mode derivative (tangent.h). Wide passes are those of head dims
// beyond 256 (wide.h).
enum class Pass { kForward, kBackward, kTangent, kWideForward, kWideBackward };

// What kind of call a pass runs.
struct CallKind {
  MaskForm mask = MaskForm::kRows;
  bool has_sinks = false;  // of a forward pass
  bool is_causal = false;  // of a wide pass, whose kernels read no mask
  int64_t keys = 0;        // of a wide pass: how many keys queries see, the first ones
};

// What a custom call says about itself. The tile sizes are those for which its lists were made; a
// tile of query rows is what one entry of a list stands for. Wide passes have neither.
struct Fa4Spec {
  std::string set;
  CallKind kind;
  int64_t tile_m = 0;
  int64_t tile_n = 0;
  float scale = 0;
};

// clang-format off
// The arrays of a call, in this order. [1|B]: one for all batch rows, or one for each; [1|N]: heads.
//
//   forward   q [B, T, N, H], k [B, S, K, H], v [B, S, K, Hv], LISTS, MASK, SINKS, MOD -> out [B, T, N, Hv], lse [B, N, T]
//   backward  q, k, v, out, lse, out_grad, lse_grad, LISTS, MASK, MOD -> dq, dk, dv, SCRATCH
//
//   tangent   q, k, v, a tangent of each, out, lse, LISTS, MASK -> the tangents of out and lse
//
//   LISTS     partial_counts [1|B, 1|N, M], partial_indices [1|B, 1|N, M, L],
//             full_counts [1|B, 1|N, M], full_indices [1|B, 1|N, M, L']: int32. A line for each tile of
//             query rows (of keys, backward), which lists tiles of keys or query rows.
//   MASK      rows int32 [1|B, T, 4]: start and length of two intervals of keys for each query row;
//             or bits uint32 [1|B, 1|N, T, S / 32 rounded up], for each key from the lowest bit on
//   SINKS     in a call that has sinks, float32 [1|B, N]; its backward pass does not read them
//   MOD       in a variant, the arrays that its change of scores reads: [L] each, float32 or int32
//   SCRATCH   products and lse2 [B, N, T'], query_sums [B, N, T' * H] and, if N != K,
//             key_sums [B, K, S' * H], value_sums [B, K, S' * Hv]: float32. T' is T rounded up to
//             backward_tile_m, S' is S rounded up to backward_tile_n.
// clang-format on

// The set of a spec in the loaded library, if it has one whose tiles are those of the spec.
Result<CompiledSet*> find_set(const Fa4Spec& spec, Pass pass);

// Loads the kernels of a pass on the current device. Must not be called inside a stream capture.
Status load_pass(CompiledSet& set, CallKind kind, Pass pass, int32_t ordinal);

// Checks every array against what the kernels touch, then queues the pass. With `poisons`, results
// and scratch are filled with NaN before.
Status run_forward(const CompiledSet& set, CallKind kind, float scale,
                   const std::vector<Array>& operands, const std::vector<Array>& results,
                   bool poisons, cudaStream_t stream);
Status run_backward(const CompiledSet& set, CallKind kind, float scale,
                    const std::vector<Array>& operands, const std::vector<Array>& results,
                    bool poisons, cudaStream_t stream);

}  // namespace attn_dispatch
