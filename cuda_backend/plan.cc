#include "plan.h"

#include <cudnn_frontend.h>

#include <algorithm>
#include <mutex>
#include <numeric>

#include "buffers.h"
#include "cudnn_failure.h"
#include "engine.h"
#include "frontend_calls.h"
#include "graph.h"
#include "known_bad.h"
#include "load_or_rebuild.h"
#include "plan_line.h"
#include "wrong_value.h"

namespace attn_dispatch {
namespace fe = cudnn_frontend;
using Json = nlohmann::json;

namespace {

// A plan takes some 100 KB of host memory, and a loaded plan as much on the device.
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

// Imported plans that were rebuilt, kept until take_remade_plans.
struct RemadePlans {
  std::mutex mutex;
  std::map<std::string, std::shared_ptr<const Plan>> by_key;
};

RemadePlans& remade_plans() {
  static auto* instance = new RemadePlans;
  return *instance;
}

// The properties that distinguish kinds of device: not those that identify this card, and not those
// that cuDNN 9.28 reports and 9.19 does not, so that one file describes a device to both. The
// device's name is among those left out.
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
  ATTN_RETURN_IF_ERROR(frontend_status(properties->deserialize(bytes), Code::kWrongCall,
                                       "device properties refused"));
  return properties;
}

// Parses device properties, which may come from a file: limits their size and nesting, and requires
// the compute capability.
Result<Json> read_properties(const std::string& text) {
  constexpr size_t kMostBytes = 1 << 16;
  constexpr ptrdiff_t kMostLists = 64;  // which limits the depth of nesting as well
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

// Refuses a plan that reads other pointers than one for each of the call's buffers.
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

// The graph of a spec, validated by cuDNN, without any engine yet.
Result<std::shared_ptr<fe::graph::Graph>> validated_graph(const SdpaSpec& spec,
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
  ATTN_RETURN_IF_ERROR(
      frontend_status(graph.validate(), Code::kUnsupported, "cuDNN refuses the graph"));
  ATTN_RETURN_IF_ERROR(frontend_status(graph.build_operation_graph(), Code::kUnsupported,
                                       "cuDNN refuses the graph"));
  return made;
}

// Adds plans to the graph: for the engines that the heuristics propose, or for the requested one.
Status add_plans(fe::graph::Graph& graph, const std::string& engine_text) {
  constexpr char kNone[] = "cuDNN has no engine for it";
  if (engine_text.empty()) {
    return frontend_status(graph.create_execution_plans({fe::HeurMode_t::A}), Code::kUnsupported,
                           kNone);
  }
  auto engine = parse_engine(engine_text);
  if (!engine.ok()) return engine.status;
  return frontend_status(graph.create_execution_plan(engine.value.id, engine.value.knobs),
                         Code::kUnsupported, "cuDNN refuses the engine");
}

PlanResult build_plan(const SdpaSpec& spec, const std::string& properties, std::string key) {
  auto made = validated_graph(spec, properties);
  if (!made.ok()) return made.status;
  fe::graph::Graph& graph = *made.value;
  ATTN_RETURN_IF_ERROR(add_plans(graph, spec.engine));
  ATTN_RETURN_IF_ERROR(
      frontend_status(graph.check_support(), Code::kUnsupported, "cuDNN has no engine for it"));
  const std::string proposed = std::to_string(graph.get_execution_plan_count());
  if (fe::error_t built = graph.build_plans(fe::BuildPlanPolicy_t::HEURISTICS_CHOICE);
      built.is_bad()) {
    // The frontend's message has no reason; cuDNN still has that of the last engine.
    return cudnn_failure("all " + proposed + " engine configurations failed to finalize",
                         built.get_message() + '\n' + fe::detail::get_last_error_string_(),
                         Code::kFinalizeFailed);
  }
  ATTN_RETURN_IF_ERROR(check_pointers(spec, graph));

  auto plan = std::make_shared<Plan>();
  plan->spec = spec;
  plan->key = std::move(key);
  ATTN_RETURN_IF_ERROR(frontend_status(graph.get_workspace_size(plan->workspace_bytes),
                                       Code::kLibrary, "no workspace size"));
  ATTN_RETURN_IF_ERROR(
      frontend_status(graph.get_plan_name(plan->engine), Code::kLibrary, "no engine name"));
  ATTN_RETURN_IF_ERROR(frontend_status(graph.serialize(plan->blob, /*serialize_structure=*/false),
                                       Code::kLibrary, "the plan could not be serialized"));
  return PlanResult(std::move(plan));
}

LoadedResult load(std::shared_ptr<const Plan> plan, int32_t device_ordinal) {
  auto handle = thread_handle(device_ordinal, /*stream=*/nullptr);
  if (!handle.ok()) return handle.status;
  auto graph = std::make_shared<fe::graph::Graph>();
  // No warm-up, which would call cudaMalloc.
  ATTN_RETURN_IF_ERROR(frontend_status(graph->deserialize(handle.value, plan->blob,
                                                          /*enforce_precompiled=*/true,
                                                          /*run_warmup=*/false),
                                       Code::kDevice,
                                       "the plan could not be loaded on the device"));
  if (plan->is_imported) ATTN_RETURN_IF_ERROR(check_pointers(plan->spec, *graph));
  int64_t workspace_bytes = 0;
  ATTN_RETURN_IF_ERROR(frontend_status(graph->get_workspace_size(workspace_bytes), Code::kDevice,
                                       "no workspace size"));
  if (workspace_bytes > plan->workspace_bytes) {
    return Status{Code::kDevice, "the plan needs a workspace of " +
                                     std::to_string(workspace_bytes) +
                                     " bytes on the device, and " +
                                     std::to_string(plan->workspace_bytes) + " were expected"};
  }
  return LoadedPlan::of(std::move(plan), std::move(graph));
}

}  // namespace

Result<std::string> device_properties(int32_t device_ordinal) {
  return catch_exceptions([&]() -> Result<std::string> {
    if (!cudnn_version()) return Status{Code::kLibrary, "cuDNN is not loaded"};
    const std::string step = "no properties of device " + std::to_string(device_ordinal);
    fe::DeviceProperties properties;
    properties.set_device_id(device_ordinal);
    ATTN_RETURN_IF_ERROR(frontend_status(properties.build(), Code::kDevice, step.c_str()));
    std::vector<uint8_t> bytes;
    ATTN_RETURN_IF_ERROR(frontend_status(properties.serialize(bytes), Code::kDevice, step.c_str()));
    while (!bytes.empty() && bytes.back() == 0) bytes.pop_back();
    return std::string(bytes.begin(), bytes.end());
  });
}

PlanResult plan_for(const SdpaSpec& spec, const std::string& properties) {
  auto key = plan_key(spec, properties);
  if (!key.ok()) return key.status;
  return plan_cache().get(key.value, [&]() -> PlanResult {
    return catch_exceptions([&] { return build_plan(spec, properties, key.value); });
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
    return catch_exceptions([&] {
      return load_or_rebuild(
          plan.value, [&](auto made) { return load(std::move(made), device_ordinal); },
          [&](const Plan& old) { return build_plan(old.spec, properties.value, old.key); },
          [&](auto made) {
            plan_cache().replace(made->key, made);
            std::lock_guard<std::mutex> lock(remade_plans().mutex);
            remade_plans().by_key[made->key] = std::move(made);
          });
    });
  });
}

CacheStats plan_cache_stats() { return plan_cache().stats(); }

Result<std::string> plan_key(const SdpaSpec& spec, const std::string& properties) {
  if (!cudnn_version()) return Status{Code::kLibrary, "cuDNN is not loaded"};
  return catch_exceptions([&]() -> Result<std::string> {
    auto parsed = read_properties(properties);
    if (!parsed.ok()) return parsed.status;
    return spec.key() + "cudnn=" + std::to_string(cudnn_version()) +
           " frontend=" + std::to_string(CUDNN_FRONTEND_VERSION) + " made by " ATTN_SOURCES + ' ' +
           device_kind(std::move(parsed.value));
  });
}

Result<std::string> engines_for(const SdpaSpec& spec, const std::string& properties) {
  if (!cudnn_version()) return Status{Code::kLibrary, "cuDNN is not loaded"};
  return catch_exceptions([&]() -> Result<std::string> {
    auto made = validated_graph(spec, properties);
    if (!made.ok()) return made.status;
    ATTN_RETURN_IF_ERROR(add_plans(*made.value, ""));
    return proposed_engines(*made.value);
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
  return catch_exceptions([&]() -> Result<std::string> { return format_plan(*plan.value); });
}

Status import_plan(const SdpaSpec& spec, const std::string& properties, const std::string& line) {
  auto key = plan_key(spec, properties);
  if (!key.ok()) return key.status;
  return catch_exceptions([&]() -> Status {
    const auto device = device_facts(properties);
    if (!device.ok()) return device.status;
    if (!known_bad_reasons(spec, cudnn_version(), device.value.sm).empty()) {
      return {Code::kWrongCall, "a plan of a call that is known to be bad"};
    }
    auto read = parse_plan(line);
    if (!read.ok()) return read.status;
    if (read.value.key != key.value) return {Code::kWrongCall, "the plan of another call"};
    auto plan = std::make_shared<Plan>(std::move(read.value));
    plan->spec = spec;
    plan->is_imported = true;
    return plan_cache().get(key.value, [&] { return PlanResult(std::move(plan)); }).status;
  });
}

Result<std::map<std::string, std::string>> take_remade_plans() {
  std::map<std::string, std::shared_ptr<const Plan>> plans;
  {
    std::lock_guard<std::mutex> lock(remade_plans().mutex);
    plans.swap(remade_plans().by_key);
  }
  return catch_exceptions([&]() -> Result<std::map<std::string, std::string>> {
    std::map<std::string, std::string> lines;
    for (const auto& [key, plan] : plans) lines[key] = format_plan(*plan);
    return lines;
  });
}

}  // namespace attn_dispatch
