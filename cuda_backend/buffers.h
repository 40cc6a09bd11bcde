// The buffers of a custom call and their sizes, which are computed here and nowhere else.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "score_program.h"
#include "spec.h"
#include "status.h"

namespace attn_dispatch {

struct Buffer {
  std::string name;
  int64_t bytes;
};

// clang-format off
// Flags of rows, operands and results, in this order. Those in brackets are there only if the spec
// asks for them:
//
//   forward   [flags_q], query, key, value, OPTIONS -> out, [lse], [row_max, row_sum], [keep]
//   backward  [flags_q, flags_kv], query, key, value, out, lse, out_grad, OPTIONS -> dq, dk, dv, [dbias]
//
//   flags     uint8 [rows]: one for each row, or for each row and head where heads are first.
//             They are for clear_rows.h, and not part of the graph.
//
//   OPTIONS   [lengths_q, lengths_kv]        int32 [batch]
//             [offsets of query, key, value, out, [lse]]   int32 [batch + 1], in elements
//             [page_table, [value_table]]    int32 [batch, most pages of a sequence]
//             [bias]       bias_dtype [bias_batch, bias_heads, bias_rows, S rounded up to 8]
//             [o0, o1, …]  float32 or int32, as node_arrays says
//             [sinks]      float32 [num_heads]
//             [seed, seed_offset]            int64 [1] each
// clang-format on
//
// Arrays are dense: BTNH / BSKH, or packed [rows, heads, dim], where sequence b begins at offset b.
// Key and value in pages are [num_pages, page_size, heads, dim]. With head_rows_q the arrays of
// queries are BNTH, packed [·, heads, head_rows_q, dim]; with head_rows_kv likewise those of keys,
// in pages [num_pages, heads, page_size, dim]. lse, row_max and row_sum are float32 [B, N, T],
// packed [rows, N]; keep is float32 [B, N, T, S]; dbias is [bias_batch, bias_heads, T, S] in the
// dtype of the call.
//
// The last result of the custom call is the workspace. Its size depends on the plan, so it is not
// here.
struct CallBuffers {
  std::vector<Buffer> all;
  size_t flags = 0;     // the number of flag buffers
  size_t operands = 0;  // the number of operands, flags included

  size_t results() const { return all.size() - operands; }
  size_t of_graph() const { return all.size() - flags; }

  // cuDNN's uid of the tensor of this buffer; 0 if no buffer has this name. The graph's buffers are
  // numbered from 1, so that cuDNN takes the call's pointers in their order.
  int64_t uid(const std::string& name) const;
};

// The most bytes of all buffers together, more than a process can address.
inline constexpr int64_t kMostBytes = int64_t{1} << 47;

// A call has fewer than 32 buffers besides the arrays of its score program.
inline constexpr size_t kMostBuffers = kMostNodeArrays + 32;

// The buffers of a spec that passed the checks of single values (validate.cc). It is a wrong call
// if a size, the sum of sizes, or the number of scores is too large.
Result<CallBuffers> buffers_of(const SdpaSpec& spec);

}  // namespace attn_dispatch
