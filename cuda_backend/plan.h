// A plan is cuDNN's compiled form of a spec for one kind of device. It is host memory, and making
// it needs no device. A loaded plan is a plan on a device of this process. A process caches both.
//
// Plans are always made from device properties and loaded through a handle, on machines with and
// without a GPU: executing the graph with which a plan was made, without serializing it, was six
// times slower (H200, cuDNN 9.19).
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "loaded_plan.h"
#include "once_cache.h"
#include "spec.h"
#include "status.h"

namespace attn_dispatch {

struct Plan {
  SdpaSpec spec;
  std::string key;     // spec, device kind and cuDNN version
  std::string engine;  // cuDNN's name of the engine and its knobs
  int64_t workspace_bytes = 0;
  std::vector<uint8_t> blob;  // serialized, cubin included
  bool is_imported = false;   // made by another process
};

// cuDNN's properties of a device of this process, as JSON.
Result<std::string> device_properties(int32_t device_ordinal);

// The plan of a spec for a kind of device, from the cache or built now. Refusals are cached too,
// transient failures are not.
Result<std::shared_ptr<const Plan>> plan_for(const SdpaSpec& spec,
                                             const std::string& device_properties);

// As plan_for. But if cuDNN here lacks the engine that the spec names, the plan has the engine of
// cuDNN's heuristics: the program may have been lowered for another version of cuDNN.
Result<std::shared_ptr<const Plan>> plan_to_run(const SdpaSpec& spec,
                                                const std::string& device_properties);

// The plan to run for a spec on a device of this process, loaded there.
Result<std::shared_ptr<const LoadedPlan>> load_for(const SdpaSpec& spec, int32_t device_ordinal);

CacheStats plan_cache_stats();

// The engines that cuDNN proposes for a spec, whichever engine it names, as proposed_engines
// (engine.h) returns them.
Result<std::string> engines_for(const SdpaSpec& spec, const std::string& device_properties);

// The functions below store plans outside of the process, for cudnn/plan_store.py.

// Everything that a plan depends on: the spec, the kind of device, the version of cuDNN, and the
// source files that make the graph.
Result<std::string> plan_key(const SdpaSpec& spec, const std::string& device_properties);

// Whether the cache has the plan, or its refusal.
Result<bool> has_plan(const SdpaSpec& spec, const std::string& device_properties);

// The plan of a spec as a line (plan_line.h).
Result<std::string> export_plan(const SdpaSpec& spec, const std::string& device_properties);

// Puts the plan in such a line into the cache, if it is the plan of this spec for this kind of
// device. cuDNN reads it when it is loaded on a device: reading takes some 5 ms, once is enough.
Status import_plan(const SdpaSpec& spec, const std::string& device_properties,
                   const std::string& line);

// Lines by key: imported plans that did not load on a device and were rebuilt since the last call.
Result<std::map<std::string, std::string>> take_remade_plans();

}  // namespace attn_dispatch
