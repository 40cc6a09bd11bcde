// From the facts of a call to cuDNN's graph of it.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "spec.h"
#include "status.h"

namespace cudnn_frontend::graph {
class Graph;
}

namespace attn_dispatch {

// What the frontend has to know of a device, or it would ask the driver.
struct DeviceFacts {
  int32_t sm;  // compute capability, major * 10 + minor
  int32_t sm_count;
};

struct SdpaGraph {
  std::shared_ptr<cudnn_frontend::graph::Graph> graph;
  // Size of each buffer that is a tensor of the graph, operands first, then results. The one behind
  // buffer i has uid i + 1, so the call's pointers are cuDNN's in the same order.
  std::vector<int64_t> buffer_bytes;
};

// Operands and results, in this order, those in brackets only where the spec says so:
//
//   [flags_q] uint8 [rows], backward [flags_q, flags_kv], not of the graph: before all others, see
//   clear_rows.h; where heads are first, of each head's rows
//   forward   query, key, value, OPTIONS -> out, [lse], [row_max, row_sum], [keep]
//   backward  query, key, value, out, lse, out_grad, OPTIONS -> dq, dk, dv, [dbias]
//
//   OPTIONS   [lengths_q, lengths_kv]        int32 [batch]
//             [offsets of query, key, value, out, [lse]]   int32 [batch + 1], in elements
//             [page_table, [value_table]]    int32 [batch, most pages of a sequence]
//             [bias]       bias_dtype [bias_batch, bias_heads, bias_rows, S rounded up to 8]
//             [node_arrays] float32 or int32, as the spec says
//             [sinks]      float32 [num_heads]
//             [seed, offset]                 int64 [1] each
//
// Arrays are dense: BTNH / BSKH, or packed [rows, heads, dim], where sequence b begins at the
// offset of b. Key and value in pages are [num_pages, page_size, heads, dim]. With head_rows_q the
// arrays of queries are BNTH, packed [·, heads, head_rows_q, dim]; with head_rows_kv likewise those
// of keys, in pages [num_pages, heads, page_size, dim]. lse, row_max and
// row_sum are float32 [B, N, T], packed [rows, N]; keep is float32 [B, N, T, S]; dbias is
// [bias_batch, bias_heads, T, S] in the dtype of the call.
Result<SdpaGraph> make_graph(const SdpaSpec& spec, DeviceFacts device);

}  // namespace attn_dispatch
