// An engine of cuDNN with its knobs, and its text in a lowered program: "6 KERNEL_CFG=2
// STREAM_K=1".
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>

#include "status.h"

namespace cudnn_frontend {
enum class KnobType_t;
namespace graph {
class Graph;
}
}  // namespace cudnn_frontend

namespace attn_dispatch {

struct Engine {
  int64_t id = 0;
  std::unordered_map<cudnn_frontend::KnobType_t, int64_t> knobs;
};

// The text of an engine, with its knobs in alphabetical order.
std::string format_engine(const Engine& engine);

// The engine of such a text. Any other text is a wrong call; a knob that this version of the
// library does not know is unsupported.
Result<Engine> parse_engine(const std::string& text);

// JSON of two things: "proposed", the texts of the engines that cuDNN's heuristics propose for a
// graph, best first; "knobs", the values that each knob of those engines can take, as
// {"6": {"STREAM_K": [least, most, step]}}. The graph must have these proposals as its plans.
Result<std::string> proposed_engines(cudnn_frontend::graph::Graph& graph);

}  // namespace attn_dispatch
