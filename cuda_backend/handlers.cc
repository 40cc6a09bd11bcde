// The handlers of the custom call that runs cuDNN, in three stages. Instantiate decodes the spec
// and plans, so that what cuDNN refuses fails at compile time. Initialize loads the plan on each
// device that runs the program. Execute checks the sizes of all buffers and passes pointers. The
// last result is the workspace, u8[bytes], owned by XLA: nothing here allocates device memory.
#include "handlers.h"

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "buffers.h"
#include "clear_rows.h"
#include "cudnn_scope.h"
#include "environment.h"
#include "ffi_attributes.h"
#include "ffi_error.h"
#include "library.h"
#include "plan.h"
#include "spec.h"
#include "status.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace attn_dispatch {
namespace {

// A call site on one device.
struct OnDevice {
  explicit OnDevice(std::shared_ptr<const LoadedPlan> loaded) : plan(std::move(loaded)) {}

  const std::shared_ptr<const LoadedPlan> plan;
  RecentPacks packs;
};

// The state of one call site: its spec, and its plan on each device that has run it.
class CallSite {
 public:
  static ffi::TypeId id;
  static ffi::TypeInfo info;

  CallSite(SdpaSpec spec, CallBuffers buffers, bool poisons)
      : spec_(std::move(spec)), buffers_(std::move(buffers)), poisons_(poisons) {}

  const SdpaSpec& spec() const { return spec_; }
  const CallBuffers& buffers() const { return buffers_; }
  bool poisons() const { return poisons_; }

  // The plan on this device, loaded on first use.
  Result<OnDevice*> on_device(int32_t ordinal) {
    ATTN_RETURN_IF_ERROR(check_ordinal(ordinal));
    if (OnDevice* known = devices_[ordinal].load(std::memory_order_acquire)) return known;
    auto loaded = load_for(spec_, ordinal);
    if (!loaded.ok()) return loaded.status;
    std::lock_guard<std::mutex> lock(mutex_);
    // Two threads may both get here; what the first has made may be in use.
    owned_.push_back(std::make_unique<OnDevice>(std::move(loaded.value)));
    devices_[ordinal].store(owned_.back().get(), std::memory_order_release);
    return owned_.back().get();
  }

 private:
  const SdpaSpec spec_;
  const CallBuffers buffers_;
  const bool poisons_;
  std::array<std::atomic<OnDevice*>, kMaxDevices> devices_{};
  std::mutex mutex_;
  std::vector<std::unique_ptr<OnDevice>> owned_;
};

ffi::TypeId CallSite::id = {};
ffi::TypeInfo CallSite::info = ffi::MakeTypeInfo<CallSite>();

ffi::Error to_ffi(const Status& status) {
  if (status.ok()) return ffi::Error::Success();
  return ffi_error(std::string("attn_dispatch cuDNN (") + code_name(status.code) + "): ", status);
}

std::atomic<int32_t> first_local_device{0};

// XLA has not named a device yet. Any device that JAX uses shows whether the call can be planned;
// for a device of another kind initialize plans again.
ffi::ErrorOr<std::unique_ptr<CallSite>> Instantiate(ffi::Dictionary attributes) {
  auto spec = spec_of(attributes);
  if (!spec.ok()) return ffi::Unexpected(to_ffi(spec.status));
  auto buffers = buffers_of(spec.value);
  if (!buffers.ok()) return ffi::Unexpected(to_ffi(buffers.status));
  auto poison = poison_requested();
  if (!poison.ok()) return ffi::Unexpected(to_ffi(poison.status));
  CudnnScope scope;
  if (!scope.status().ok()) return ffi::Unexpected(to_ffi(scope.status()));
  auto properties = device_properties(first_local_device);
  if (!properties.ok()) return ffi::Unexpected(to_ffi(properties.status));
  auto plan = plan_to_run(spec.value, properties.value);
  if (!plan.ok()) return ffi::Unexpected(to_ffi(plan.status));
  return std::make_unique<CallSite>(std::move(spec.value), std::move(buffers.value), poison.value);
}

// Loads the plan and makes the handle, before any command buffer is captured.
ffi::Error Initialize(cudaStream_t stream, int32_t ordinal, CallSite* site, ffi::RemainingArgs,
                      ffi::RemainingRets, ffi::Dictionary) {
  CudnnScope scope;
  if (!scope.status().ok()) return to_ffi(scope.status());
  auto device = site->on_device(ordinal);
  if (!device.ok()) return to_ffi(device.status);
  if (site->spec().clears_rows) {
    if (Status status = load_clear_rows(ordinal); !status.ok()) return to_ffi(status);
  }
  return to_ffi(thread_handle(ordinal, stream).status);
}

// The pointers of one execution, whose sizes are compared with what the kernel touches.
class Pointers {
 public:
  Pointers(const CallBuffers& buffers, int64_t workspace_bytes, const ffi::RemainingArgs& args,
           const ffi::RemainingRets& rets)
      : buffers_(buffers) {
    if (args.size() != buffers.operands || rets.size() != buffers.results() + 1 ||
        buffers.all.size() > kMostBuffers) {
      fail("expected " + std::to_string(buffers.operands) + " operands, " +
           std::to_string(buffers.results()) + " results and a workspace, got " +
           std::to_string(args.size()) + " operands and " + std::to_string(rets.size()) +
           " results");
      return;
    }
    for (size_t i = 0; i < args.size(); ++i) take(i, *args.get<ffi::AnyBuffer>(i));
    for (size_t i = 0; i < buffers.results(); ++i) {
      take(buffers.operands + i, **rets.get<ffi::AnyBuffer>(i));
    }
    const ffi::AnyBuffer workspace = **rets.get<ffi::AnyBuffer>(rets.size() - 1);
    pointers_[buffers.all.size()] = workspace.untyped_data();
    workspace_bytes_ = static_cast<int64_t>(workspace.size_bytes());
    if (workspace_bytes_ < workspace_bytes) {
      fail("the program was lowered with a workspace of " + std::to_string(workspace_bytes_) +
           " bytes and this device and cuDNN " + std::to_string(cudnn_version()) + " need " +
           std::to_string(workspace_bytes) + "; lower it again here");
    }
  }

  const Status& status() const { return status_; }

  // The pointers of the graph's buffers, and the workspace after them.
  void* const* of_graph() const { return pointers_.data() + buffers_.flags; }
  size_t count_of_graph() const { return buffers_.of_graph() + 1; }

  Status poison(cudaStream_t stream) const {
    for (size_t i = buffers_.operands; i < buffers_.all.size(); ++i) {
      ATTN_RETURN_IF_ERROR(fill(pointers_[i], 0xff, buffers_.all[i].bytes, stream));
    }
    return fill(pointers_[buffers_.all.size()], 0xff, workspace_bytes_, stream);
  }

  // The rows of a result, with the flags of this index.
  FlaggedRows rows(size_t result, size_t flags) const {
    const size_t i = buffers_.operands + result;
    const int64_t count = buffers_.all[flags].bytes;  // one byte per row
    return {pointers_[i], pointers_[flags], buffers_.all[i].bytes / count, count};
  }

 private:
  void take(size_t i, const ffi::AnyBuffer& buffer) {
    pointers_[i] = buffer.untyped_data();
    const auto bytes = static_cast<int64_t>(buffer.size_bytes());
    const Buffer& expected = buffers_.all[i];
    if (bytes != expected.bytes) {
      fail("buffer " + std::to_string(i) + ", " + expected.name + ": expected " +
           std::to_string(expected.bytes) + " bytes, got " + std::to_string(bytes));
    }
  }

  void fail(std::string message) { status_ = {Code::kWrongCall, std::move(message)}; }

  const CallBuffers& buffers_;
  std::array<void*, kMostBuffers + 1> pointers_;  // those of the buffers, then the workspace
  int64_t workspace_bytes_ = 0;
  Status status_;
};

// Clears rows of out, or of dq, dk and dv.
Status clear_results(bool is_backward, const Pointers& pointers, int32_t ordinal,
                     cudaStream_t stream) {
  constexpr size_t kOfQueries = 0, kOfKeys = 1;
  const FlaggedRows of_queries = pointers.rows(0, kOfQueries);
  if (!is_backward) return clear_rows(&of_queries, 1, ordinal, stream);
  const FlaggedRows all[] = {of_queries, pointers.rows(1, kOfKeys), pointers.rows(2, kOfKeys)};
  return clear_rows(all, 3, ordinal, stream);
}

ffi::Error Execute(cudaStream_t stream, int32_t ordinal, CallSite* site, ffi::RemainingArgs args,
                   ffi::RemainingRets rets, ffi::Dictionary) {
  auto device = site->on_device(ordinal);
  if (!device.ok()) return to_ffi(device.status);
  auto handle = thread_handle(ordinal, stream);
  if (!handle.ok()) return to_ffi(handle.status);
  const LoadedPlan& plan = *device.value->plan;
  Pointers pointers(site->buffers(), plan.plan().workspace_bytes, args, rets);
  if (!pointers.status().ok()) return to_ffi(pointers.status());
  if (site->poisons()) {
    if (Status status = pointers.poison(stream); !status.ok()) return to_ffi(status);
  }
  RecentPacks& packs = device.value->packs;
  VariantPack pack = packs.find(pointers.of_graph(), pointers.count_of_graph());
  if (!pack) {
    auto made = plan.pack(pointers.of_graph());
    if (!made.ok()) return to_ffi(made.status);
    pack = std::move(made.value);
    packs.keep(pointers.of_graph(), pointers.count_of_graph(), pack);
  }
  Status status = plan.execute(handle.value, pack);
  if (status.ok() && site->spec().clears_rows) {
    status = clear_results(site->spec().backward, pointers, ordinal, stream);
  }
  return to_ffi(status);
}

XLA_FFI_DEFINE_HANDLER(kInstantiate, Instantiate, ffi::Ffi::BindInstantiate().Attrs());
XLA_FFI_DEFINE_HANDLER(kInitialize, Initialize,
                       ffi::Ffi::BindInitialize()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .Ctx<ffi::State<CallSite>>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attrs());
XLA_FFI_DEFINE_HANDLER(kExecute, Execute,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .Ctx<ffi::State<CallSite>>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attrs(),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

void set_local_devices(const std::vector<int32_t>& ordinals) {
  first_local_device = ordinals.empty() ? 0 : ordinals.front();
}

std::map<std::string, void*> ffi_handlers() {
  return {{"instantiate", reinterpret_cast<void*>(kInstantiate)},
          {"initialize", reinterpret_cast<void*>(kInitialize)},
          {"execute", reinterpret_cast<void*>(kExecute)}};
}

std::map<std::string, void*> ffi_state_type() {
  return {{"type_id", &CallSite::id}, {"type_info", &CallSite::info}};
}

}  // namespace attn_dispatch
