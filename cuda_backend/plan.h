// A plan is what cuDNN makes of a spec for one kind of device: host memory, needing no device. A
// loaded plan is the same on a device that is here. Both are kept per process.
//
// Plans are always made from device properties and always loaded through a handle, here and on a
// machine without a GPU alike: executing the graph that planned, unserialized, ran six times slower
// (H200, cuDNN 9.19).
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cache.h"
#include "library.h"
#include "spec.h"
#include "status.h"

namespace cudnn_frontend::graph {
class Graph;
}

namespace attn_dispatch {

struct Plan {
  SdpaSpec spec;
  std::string key;     // spec, device kind and cuDNN version
  std::string engine;  // cuDNN's name of the engine and its knobs
  int64_t workspace_bytes = 0;
  std::vector<uint8_t> blob;  // serialized, cubin included
  bool is_imported = false;   // and not made in this process
};

class LoadedPlan {
 public:
  LoadedPlan(std::shared_ptr<const Plan> plan, std::shared_ptr<cudnn_frontend::graph::Graph> graph)
      : plan_(std::move(plan)), graph_(std::move(graph)) {}

  const Plan& plan() const { return *plan_; }

  // Queues the call on the handle's stream. `buffers` holds a pointer for each of the graph's
  // buffers (buffers.h). Safe from any number of threads, each with its own handle.
  Status execute(cudnnHandle_t handle, void** buffers, size_t count, void* workspace) const;

 private:
  std::shared_ptr<const Plan> plan_;
  std::shared_ptr<cudnn_frontend::graph::Graph> graph_;
};

// What cuDNN calls the properties of a device of this process, as JSON.
Result<std::string> device_properties(int32_t device_ordinal);

// The plan for a spec on a kind of device, from the cache or built now. Refusals are kept as well,
// failures that may pass are not.
Result<std::shared_ptr<const Plan>> plan_for(const SdpaSpec& spec,
                                             const std::string& device_properties);

// The same, or where the spec names an engine that there is not: that of cuDNN's heuristics. A
// program may have been lowered for another version of cuDNN.
Result<std::shared_ptr<const Plan>> plan_to_run(const SdpaSpec& spec,
                                                const std::string& device_properties);

// The plan to run for a spec on a device of this process, loaded there.
Result<std::shared_ptr<const LoadedPlan>> load_for(const SdpaSpec& spec, int32_t device_ordinal);

CacheStats plan_cache_stats();

// The engines that cuDNN proposes for a spec, whatever engine that names: see engines_of.
Result<std::string> engines_for(const SdpaSpec& spec, const std::string& device_properties);

// For keeping plans elsewhere, cudnn/plan_store.py.

// All that a plan depends on: the spec, the kind of device, cuDNN, and what made the graph of it.
Result<std::string> plan_key(const SdpaSpec& spec, const std::string& device_properties);

// Whether the plan is in the cache already, or refused.
Result<bool> has_plan(const SdpaSpec& spec, const std::string& device_properties);

// The plan as a line: its key, its engine and a checksum as JSON, a space, and what cuDNN
// serialized in hexadecimal digits.
Result<std::string> export_plan(const SdpaSpec& spec, const std::string& device_properties);

// Puts such a line into the cache, if it is the plan of this spec for this kind of device and this
// cuDNN loads it. The sizes of the plan are computed, not read.
Status import_plan(const SdpaSpec& spec, const std::string& device_properties,
                   const std::string& line);

// The lines, by key, of imported plans that did not load on a device and were made anew; each once.
Result<std::map<std::string, std::string>> take_remade_plans();

}  // namespace attn_dispatch
