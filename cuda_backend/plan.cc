#include "plan.h"

#include <cudnn_frontend.h>

#include <algorithm>
#include <mutex>
#include <numeric>

#include "buffers.h"
#include "engine.h"
#include "failure.h"
#include "graph.h"
#include "known_bad.h"
#include "plan_line.h"
#include "remake.h"
#include "wrong_value.h"

namespace attn_dispatch {
namespace fe = cudnn_frontend;
using Json = nlohmann::json;

namespace {

// A plan is some 100 KB of host memory, a loaded one as much on the device.
constexpr size_t kPlanCapacity = 1024;
constexpr size_t kLoadedCapacity = 1024;

using PlanCache = OnceCache<std::shared_ptr<const Plan>>;
using LoadedCache = OnceCache<std::shared_ptr<const LoadedPlan>>;
using PlanResult = PlanCache::Value;
using LoadedResult = LoadedCache::Value;

PlanCache& plan_cache() {
  static auto* instance = new PlanCache(kPlanCapacity);
  return *instance;
}

LoadedCache& loaded_cache() {
  static auto* instance = new LoadedCache(kLoadedCapacity);
  return *instance;
}

// Imported plans that were made anew since, kept until somebody takes them.
struct Remade {
  std::mutex mutex;
  std::map<std::string, std::shared_ptr<const Plan>> by_key;
};

Remade& remade() {
  static auto* instance = new Remade;
  return *instance;
}

// cudnn-frontend and its JSON library throw; nothing here does.
template <typename Function>
auto guarded(Function&& function) -> decltype(function()) {
  try {
    return function();
  } catch (const fe::cudnnException& e) {
    return cudnn_failure("cudnn-frontend failed", e.what(), Code::kUnsupported);
  } catch (const std::exception& e) {
    return Status{Code::kLibrary, std::string("cudnn-frontend failed: ") + e.what()};
  } catch (...) {
    return Status{Code::kLibrary, "cudnn-frontend failed for an unknown reason"};
  }
}

Status from_cudnn(fe::error_t error, Code code, const char* step) {
  if (error.is_good()) return {};
  if (error.get_code() == fe::error_code_t::CUDA_API_FAILED) code = Code::kDevice;
  return cudnn_failure(step, error.get_message(), code);
}

// What distinguishes kinds of device: the properties without the numbers of this very card, and
// without those that cuDNN 9.28 reports and 9.19 does not, so that one file describes a device to
// both. The name goes with them.
std::string device_kind(Json properties) {
  for (const char* name : {"pciDeviceId", "cudaDeviceId", "memoryBusWidth", "smCountOrigin",
                           "oversizedSharedMemoryPerBlock"}) {
    properties.erase(name);
  }
  return properties.dump();
}

Result<std::shared_ptr<fe::DeviceProperties>> make_properties(const std::string& json) {
  auto properties = std::make_shared<fe::DeviceProperties>();
  std::vector<uint8_t> bytes(json.begin(), json.end());
  bytes.push_back(0);
  ATTN_RETURN_IF_ERROR(
      from_cudnn(properties->deserialize(bytes), Code::kWrongCall, "device properties refused"));
  return properties;
}

// Device properties come from files as well: no more than a page, a list or two in it, and what the
// graph has to know.
Result<Json> read_properties(const std::string& text) {
  constexpr size_t kMostBytes = 1 << 16;
  constexpr ptrdiff_t kMostLists = 64;  // each may be inside another: a depth
  const Status wrong{Code::kWrongCall,
                     "expected device properties as a JSON object with deviceVer"};
  if (text.size() > kMostBytes || std::count(text.begin(), text.end(), '[') > kMostLists ||
      std::count(text.begin(), text.end(), '{') > kMostLists) {
    return wrong;
  }
  Json read = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!read.is_object() || !read.contains("deviceVer")) return wrong;
  return read;
}

Result<DeviceFacts> device_facts(const std::string& properties) {
  const auto read = read_properties(properties);
  if (!read.ok()) return read.status;
  const auto number = [&](const char* name) -> int64_t {
    const auto found = read.value.find(name);
    return found != read.value.end() && found->is_number_integer() ? found->get<int64_t>() : 0;
  };
  constexpr int64_t kMost = 1 << 20;
  for (const char* name : {"deviceVer", "multiProcessorCount"}) {
    if (const int64_t value = number(name); value < 1 || value > kMost) {
      return wrong_value(std::string("device properties: ") + name, "a positive number", value);
    }
  }
  return DeviceFacts{static_cast<int32_t>(number("deviceVer") / 10),
                     static_cast<int32_t>(number("multiProcessorCount"))};
}

// Refuses a plan that wants pointers other than one for each of the call's buffers.
Status check_pointers(const SdpaSpec& spec, const fe::graph::Graph& graph) {
  const auto buffers = buffers_of(spec);
  if (!buffers.ok()) return buffers.status;
  std::vector<int64_t> expected(buffers.value.of_graph());
  std::iota(expected.begin(), expected.end(), 1);
  const std::vector<int64_t> got = graph.get_variant_pack_uids_sorted();
  if (got == expected) return {};
  return {Code::kUnsupported, "cuDNN's plan reads " + std::to_string(got.size()) +
                                  " of the call's " + std::to_string(expected.size()) + " buffers"};
}

// The graph of a spec, as far as cuDNN has checked it and not yet chosen an engine.
Result<std::shared_ptr<fe::graph::Graph>> checked_graph(const SdpaSpec& spec,
                                                        const std::string& properties_json) {
  const auto facts = device_facts(properties_json);
  if (!facts.ok()) return facts.status;
  std::string known_bad;
  for (const std::string& reason : known_bad_reasons(spec, cudnn_version(), facts.value.sm)) {
    known_bad += (known_bad.empty() ? "" : "; ") + reason;
  }
  if (!known_bad.empty()) return Status{Code::kUnsupported, known_bad};

  auto made = make_graph(spec, facts.value);
  if (!made.ok()) return made.status;
  auto properties = make_properties(properties_json);
  if (!properties.ok()) return properties.status;

  fe::graph::Graph& graph = *made.value;
  graph.set_device_properties(properties.value);
  ATTN_RETURN_IF_ERROR(from_cudnn(graph.validate(), Code::kUnsupported, "cuDNN refuses the graph"));
  ATTN_RETURN_IF_ERROR(
      from_cudnn(graph.build_operation_graph(), Code::kUnsupported, "cuDNN refuses the graph"));
  return made;
}

// The engines that the heuristics propose, or the one that is asked for, as plans of the graph.
Status propose(fe::graph::Graph& graph, const std::string& engine_words) {
  constexpr char kNone[] = "cuDNN has no engine for it";
  if (engine_words.empty()) {
    return from_cudnn(graph.create_execution_plans({fe::HeurMode_t::A}), Code::kUnsupported, kNone);
  }
  auto engine = engine_of(engine_words);
  if (!engine.ok()) return engine.status;
  return from_cudnn(graph.create_execution_plan(engine.value.id, engine.value.knobs),
                    Code::kUnsupported, "cuDNN refuses the engine");
}

PlanResult build_plan(const SdpaSpec& spec, const std::string& properties, std::string key) {
  auto made = checked_graph(spec, properties);
  if (!made.ok()) return made.status;
  fe::graph::Graph& graph = *made.value;
  ATTN_RETURN_IF_ERROR(propose(graph, spec.engine));
  ATTN_RETURN_IF_ERROR(
      from_cudnn(graph.check_support(), Code::kUnsupported, "cuDNN has no engine for it"));
  const std::string proposed = std::to_string(graph.get_execution_plan_count());
  if (fe::error_t built = graph.build_plans(fe::BuildPlanPolicy_t::HEURISTICS_CHOICE);
      built.is_bad()) {
    // The frontend says no more than that; cuDNN still knows what became of the last one.
    return cudnn_failure("all " + proposed + " engine configurations failed to finalize",
                         built.get_message() + '\n' + fe::detail::get_last_error_string_(),
                         Code::kFinalizeFailed);
  }
  ATTN_RETURN_IF_ERROR(check_pointers(spec, graph));

  auto plan = std::make_shared<Plan>();
  plan->spec = spec;
  plan->key = std::move(key);
  ATTN_RETURN_IF_ERROR(from_cudnn(graph.get_workspace_size(plan->workspace_bytes), Code::kLibrary,
                                  "no workspace size"));
  ATTN_RETURN_IF_ERROR(
      from_cudnn(graph.get_plan_name(plan->engine), Code::kLibrary, "no engine name"));
  ATTN_RETURN_IF_ERROR(from_cudnn(graph.serialize(plan->blob, /*serialize_structure=*/false),
                                  Code::kLibrary, "the plan could not be serialized"));
  return PlanResult(std::move(plan));
}

LoadedResult load(std::shared_ptr<const Plan> plan, int32_t device_ordinal) {
  auto handle = thread_handle(device_ordinal, /*stream=*/nullptr);
  if (!handle.ok()) return handle.status;
  auto graph = std::make_shared<fe::graph::Graph>();
  // The warm-up would call cudaMalloc.
  ATTN_RETURN_IF_ERROR(from_cudnn(graph->deserialize(handle.value, plan->blob,
                                                     /*enforce_precompiled=*/true,
                                                     /*run_warmup=*/false),
                                  Code::kDevice, "the plan could not be loaded on the device"));
  int64_t workspace_bytes = 0;
  ATTN_RETURN_IF_ERROR(
      from_cudnn(graph->get_workspace_size(workspace_bytes), Code::kDevice, "no workspace size"));
  if (workspace_bytes > plan->workspace_bytes) {
    return Status{Code::kDevice, "the plan needs a workspace of " +
                                     std::to_string(workspace_bytes) +
                                     " bytes on the device, and " +
                                     std::to_string(plan->workspace_bytes) + " were expected"};
  }
  return LoadedResult(std::make_shared<const LoadedPlan>(std::move(plan), std::move(graph)));
}

}  // namespace

Status LoadedPlan::execute(cudnnHandle_t handle, void** buffers, size_t count,
                           void* workspace) const {
  return guarded([&]() -> Status {
    return from_cudnn(graph_->execute(handle, buffers, static_cast<int>(count), workspace),
                      Code::kDevice, "cuDNN could not queue the call");
  });
}

Result<std::string> device_properties(int32_t device_ordinal) {
  return guarded([&]() -> Result<std::string> {
    if (!cudnn_version()) return Status{Code::kLibrary, "cuDNN is not loaded"};
    const std::string step = "no properties of device " + std::to_string(device_ordinal);
    fe::DeviceProperties properties;
    properties.set_device_id(device_ordinal);
    ATTN_RETURN_IF_ERROR(from_cudnn(properties.build(), Code::kDevice, step.c_str()));
    std::vector<uint8_t> bytes;
    ATTN_RETURN_IF_ERROR(from_cudnn(properties.serialize(bytes), Code::kDevice, step.c_str()));
    while (!bytes.empty() && bytes.back() == 0) bytes.pop_back();
    return std::string(bytes.begin(), bytes.end());
  });
}

PlanResult plan_for(const SdpaSpec& spec, const std::string& properties) {
  auto key = plan_key(spec, properties);
  if (!key.ok()) return key.status;
  return plan_cache().get(key.value, [&]() -> PlanResult {
    return guarded([&] { return build_plan(spec, properties, key.value); });
  });
}

PlanResult plan_to_run(const SdpaSpec& spec, const std::string& properties) {
  auto plan = plan_for(spec, properties);
  if (plan.ok() || spec.engine.empty() || plan.status.is_transient()) return plan;
  SdpaSpec untuned = spec;
  untuned.engine.clear();
  return plan_for(untuned, properties);
}

LoadedResult load_for(const SdpaSpec& spec, int32_t device_ordinal) {
  auto properties = device_properties(device_ordinal);
  if (!properties.ok()) return properties.status;
  auto plan = plan_to_run(spec, properties.value);
  if (!plan.ok()) return plan.status;
  const std::string key = plan.value->key + " on device " + std::to_string(device_ordinal);
  return loaded_cache().get(key, [&]() -> LoadedResult {
    return guarded([&] {
      return loaded_or_remade(
          plan.value, [&](auto made) { return load(std::move(made), device_ordinal); },
          [&](const Plan& old) { return build_plan(old.spec, properties.value, old.key); },
          [&](auto made) {
            plan_cache().replace(made->key, made);
            std::lock_guard<std::mutex> lock(remade().mutex);
            remade().by_key[made->key] = std::move(made);
          });
    });
  });
}

CacheStats plan_cache_stats() { return plan_cache().stats(); }

Result<std::string> plan_key(const SdpaSpec& spec, const std::string& properties) {
  if (!cudnn_version()) return Status{Code::kLibrary, "cuDNN is not loaded"};
  return guarded([&]() -> Result<std::string> {
    auto parsed = read_properties(properties);
    if (!parsed.ok()) return parsed.status;
    return spec.key() + "cudnn=" + std::to_string(cudnn_version()) +
           " frontend=" + std::to_string(CUDNN_FRONTEND_VERSION) + " made by " ATTN_SOURCES + ' ' +
           device_kind(std::move(parsed.value));
  });
}

Result<std::string> engines_for(const SdpaSpec& spec, const std::string& properties) {
  if (!cudnn_version()) return Status{Code::kLibrary, "cuDNN is not loaded"};
  return guarded([&]() -> Result<std::string> {
    auto made = checked_graph(spec, properties);
    if (!made.ok()) return made.status;
    ATTN_RETURN_IF_ERROR(propose(*made.value, ""));
    return engines_of(*made.value);
  });
}

Result<bool> has_plan(const SdpaSpec& spec, const std::string& properties) {
  auto key = plan_key(spec, properties);
  if (!key.ok()) return key.status;
  return plan_cache().has(key.value);
}

Result<std::string> export_plan(const SdpaSpec& spec, const std::string& properties) {
  auto plan = plan_for(spec, properties);
  if (!plan.ok()) return plan.status;
  return guarded([&]() -> Result<std::string> { return line_of(*plan.value); });
}

Status import_plan(const SdpaSpec& spec, const std::string& properties, const std::string& line) {
  auto key = plan_key(spec, properties);
  if (!key.ok()) return key.status;
  return guarded([&]() -> Status {
    const auto device = device_facts(properties);
    if (!device.ok()) return device.status;
    if (!known_bad_reasons(spec, cudnn_version(), device.value.sm).empty()) {
      return {Code::kWrongCall, "a plan of a call that is known to be bad"};
    }
    auto read = read_line(line);
    if (!read.ok()) return read.status;
    if (read.value.key != key.value) return {Code::kWrongCall, "the plan of another call"};
    auto plan = std::make_shared<Plan>(std::move(read.value));
    plan->spec = spec;
    plan->is_imported = true;
    auto made_properties = make_properties(properties);
    if (!made_properties.ok()) return made_properties.status;
    fe::graph::Graph graph;
    graph.set_device_properties(made_properties.value);
    ATTN_RETURN_IF_ERROR(from_cudnn(graph.deserialize(plan->blob, /*enforce_precompiled=*/true),
                                    Code::kWrongCall, "cuDNN does not load the plan"));
    ATTN_RETURN_IF_ERROR(from_cudnn(graph.get_workspace_size(plan->workspace_bytes), Code::kLibrary,
                                    "no workspace size"));
    ATTN_RETURN_IF_ERROR(check_pointers(spec, graph));
    return plan_cache().get(key.value, [&] { return PlanResult(std::move(plan)); }).status;
  });
}

Result<std::map<std::string, std::string>> take_remade_plans() {
  std::map<std::string, std::shared_ptr<const Plan>> plans;
  {
    std::lock_guard<std::mutex> lock(remade().mutex);
    plans.swap(remade().by_key);
  }
  return guarded([&]() -> Result<std::map<std::string, std::string>> {
    std::map<std::string, std::string> lines;
    for (const auto& [key, plan] : plans) lines[key] = line_of(*plan);
    return lines;
  });
}

}  // namespace attn_dispatch
