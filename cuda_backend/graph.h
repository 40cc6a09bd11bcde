// From the facts of a call to cuDNN's graph of it.
#pragma once

#include <cstdint>
#include <memory>

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

// The graph of a spec that is in order. The tensor behind each of its buffers has the uid that
// buffers.h gives it.
Result<std::shared_ptr<cudnn_frontend::graph::Graph>> make_graph(const SdpaSpec& spec,
                                                                 DeviceFacts device);

}  // namespace attn_dispatch
