// An engine of cuDNN with its knobs, in words that stand in a program: "6 KERNEL_CFG=2 STREAM_K=1".
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

// The words of an engine, knobs in the order of their names; and back. Words that are none are a
// wrong call. A knob that only another version of this library knows is unsupported.
std::string words_of(const Engine& engine);
Result<Engine> engine_of(const std::string& words);

// The engines that cuDNN's heuristics propose for a graph, best first, as a list of words, and what
// values each knob of those engines can take, as {"6": {"STREAM_K": [least, most, step]}}. JSON of
// "proposed" and "knobs". The graph has its operation graph and these proposals as its plans.
Result<std::string> engines_of(cudnn_frontend::graph::Graph& graph);

}  // namespace attn_dispatch
