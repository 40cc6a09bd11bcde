// Makes cuDNN's graph of a call from its spec.
#pragma once

#include <cstdint>
#include <memory>

#include "spec.h"
#include "status.h"

namespace cudnn_frontend::graph {
class Graph;
}

namespace attn_dispatch {

// The facts about a device that cudnn-frontend would otherwise ask the driver for.
struct DeviceFacts {
  int32_t sm;  // compute capability, major * 10 + minor
  int32_t sm_count;
};

// The graph of a validated spec. Its tensors have the uids of the call's buffers (buffers.h).
Result<std::shared_ptr<cudnn_frontend::graph::Graph>> make_graph(const SdpaSpec& spec,
                                                                 DeviceFacts device);

}  // namespace attn_dispatch
