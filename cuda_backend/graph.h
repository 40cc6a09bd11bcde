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
  // Size of each buffer of the custom call, operands first, then results, the workspace left out.
  // The tensor behind buffer i has uid i + 1, so the call's pointers are cuDNN's in the same order.
  std::vector<int64_t> buffer_bytes;
};

// Operands and results, in this order:
//   forward   query, key, value, [lengths_q, lengths_kv]                    -> out, [lse]
//   backward  query, key, value, out, lse, out_grad, [lengths_q, lengths_kv] -> dq, dk, dv
// Arrays are BTNH / BSKH and dense; lse is float32 [B, N, T].
Result<SdpaGraph> make_graph(const SdpaSpec& spec, DeviceFacts device);

}  // namespace attn_dispatch
