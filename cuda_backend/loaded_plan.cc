#include "loaded_plan.h"

#include <algorithm>
#include <utility>

#include "cudnn_scope.h"
#include "frontend_calls.h"
#include "plan.h"

namespace attn_dispatch {
namespace {

// cudnn-frontend's graph, whose plans only derived classes can read.
struct OpenGraph : fe::graph::Graph {
  static fe::graph::Execution_plan_list& plans_of(fe::graph::Graph& graph) {
    return graph.*&OpenGraph::plans;
  }
};

constexpr char kCannotQueue[] = "cuDNN could not queue the call";

Status backend_status(cudnnStatus_t status) {
  if (status == CUDNN_STATUS_SUCCESS) return {};
  const std::string name = fe::detail::get_error_string(status);
  return cudnn_failure(kCannotQueue, name + ": " + fe::detail::get_last_error_string_(),
                       Code::kDevice);
}

// Destroys a variant pack, unless the process ends or cuDNN is another process's.
void destroy(void* pack) {
  CudnnScope scope;
  if (scope.status().ok()) fe::detail::destroy_descriptor(pack);
}

}  // namespace

Result<std::shared_ptr<const LoadedPlan>> LoadedPlan::of(std::shared_ptr<const Plan> plan,
                                                         std::shared_ptr<fe::graph::Graph> graph) {
  int64_t all_bytes = 0;
  ATTN_RETURN_IF_ERROR(
      frontend_status(graph->get_workspace_size(all_bytes), Code::kDevice, "no workspace size"));
  ATTN_RETURN_IF_ERROR(frontend_status(graph->prepare_variant_pack_template(), Code::kLibrary,
                                       "the plan's buffers are not known"));
  const auto& plans = OpenGraph::plans_of(*graph);
  ATTN_RETURN_IF_ERROR(frontend_status(plans.is_plan_index_executable(plans.candidate),
                                       Code::kLibrary, "the plan was not built"));
  const auto& chosen = plans.execution_plans[plans.candidate];
  std::shared_ptr<LoadedPlan> made(new LoadedPlan);
  made->plan_ = std::move(plan);
  made->descriptor_ = chosen->get_raw_desc();
  made->engine_workspace_ = all_bytes - chosen->getWorkspaceSize();
  made->graph_ = std::move(graph);
  return std::shared_ptr<const LoadedPlan>(std::move(made));
}

// As Graph::execute of cudnn-frontend, which also fills parts of the workspace for options that
// graphs here do not have: its own ALiBi, and dropout before cuDNN 9.6.
Result<VariantPack> LoadedPlan::pack(void* const* pointers) const {
  return catch_exceptions([&]() -> Result<VariantPack> {
    const auto& layout = graph_->varpack_template;
    std::vector<void*> all = layout.template_ptrs;
    for (const int slot : layout.user_slots) all[slot] = *pointers++;
    char* const workspace = static_cast<char*>(*pointers);
    for (const auto& [slot, offset] : layout.workspace_slots) all[slot] = workspace + offset;
    for (const auto& [slot, source] : layout.replacement_slots) {
      all[slot] = static_cast<char*>(all[source.first]) + source.second;
    }
    void* const engine_workspace = workspace + engine_workspace_;
    const auto count = static_cast<int64_t>(all.size());
    void* made = nullptr;
    ATTN_RETURN_IF_ERROR(backend_status(
        fe::detail::create_descriptor(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, &made)));
    VariantPack pack(made, destroy);
    const auto set = [&](cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
                         int64_t size, const void* values) {
      return backend_status(fe::detail::set_attribute(made, name, type, size, values));
    };
    ATTN_RETURN_IF_ERROR(
        set(CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, &engine_workspace));
    ATTN_RETURN_IF_ERROR(
        set(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, count, all.data()));
    ATTN_RETURN_IF_ERROR(
        set(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, count, layout.all_uids.data()));
    ATTN_RETURN_IF_ERROR(backend_status(fe::detail::finalize(made)));
    return pack;
  });
}

Status LoadedPlan::execute(cudnnHandle_t handle, const VariantPack& pack) const {
  return catch_exceptions(
      [&] { return backend_status(fe::detail::execute(handle, descriptor_, pack.get())); });
}

VariantPack RecentPacks::find(void* const* pointers, size_t count) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const Entry& entry : entries_) {
    if (entry.pointers.size() == count &&
        std::equal(pointers, pointers + count, entry.pointers.begin())) {
      return entry.pack;
    }
  }
  return nullptr;
}

void RecentPacks::keep(void* const* pointers, size_t count, VariantPack pack) {
  Entry entry{{pointers, pointers + count}, std::move(pack)};
  std::lock_guard<std::mutex> lock(mutex_);
  std::swap(entries_[oldest_], entry);  // the oldest is destroyed once the mutex is free
  oldest_ = (oldest_ + 1) % kKept;
}

}  // namespace attn_dispatch
