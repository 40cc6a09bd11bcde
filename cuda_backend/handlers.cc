// One custom call, in three stages: instantiate decodes the spec and plans, so that what cuDNN
// refuses fails at compile time; initialize loads the plan on each device that runs the program;
// execute passes pointers. The last result is the workspace, u8[bytes], owned by XLA: nothing here
// allocates device memory.
#include "handlers.h"

#include <array>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <vector>

#include "attributes.h"
#include "clear_rows.h"
#include "library.h"
#include "plan.h"
#include "spec.h"
#include "status.h"
#include "visit.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace attn_dispatch {
namespace {

constexpr int32_t kMaxDevices = 64;
constexpr size_t kMaxBuffers = 32;

// State of one call site: its spec, and its plan on each device that has run it.
class CallSite {
 public:
  static ffi::TypeId id;
  static ffi::TypeInfo info;

  explicit CallSite(SdpaSpec spec) : spec_(std::move(spec)) {}

  const SdpaSpec& spec() const { return spec_; }

  // The plan on this device; loads it the first time.
  Result<const LoadedPlan*> on_device(int32_t ordinal) {
    if (ordinal < 0 || ordinal >= kMaxDevices) {
      return Status{Code::kDevice, "device ordinal " + std::to_string(ordinal) +
                                       " is out of range: expected below " +
                                       std::to_string(kMaxDevices)};
    }
    if (const LoadedPlan* plan = loaded_[ordinal].load(std::memory_order_acquire)) return plan;
    auto loaded = load_for(spec_, ordinal);
    if (!loaded.ok()) return loaded.status;
    std::lock_guard<std::mutex> lock(mutex_);
    owned_.push_back(loaded.value);
    loaded_[ordinal].store(loaded.value.get(), std::memory_order_release);
    return loaded.value.get();
  }

 private:
  const SdpaSpec spec_;
  std::array<std::atomic<const LoadedPlan*>, kMaxDevices> loaded_{};
  std::mutex mutex_;
  std::vector<std::shared_ptr<const LoadedPlan>> owned_;
};

ffi::TypeId CallSite::id = {};
ffi::TypeInfo CallSite::info = ffi::MakeTypeInfo<CallSite>();

ffi::Error to_ffi(const Status& status) {
  const std::string text =
      std::string("attn_dispatch cuDNN (") + code_name(status.code) + "): " + status.message;
  switch (status.code) {
    case Code::kOk:
      return ffi::Error::Success();
    case Code::kWrongCall:
      return ffi::Error(ffi::ErrorCode::kInvalidArgument, text);
    case Code::kUnsupported:
      return ffi::Error(ffi::ErrorCode::kUnimplemented, text);
    case Code::kLibrary:
      return ffi::Error(ffi::ErrorCode::kFailedPrecondition, text);
    case Code::kFinalizeFailed:
    case Code::kDevice:
      break;
  }
  return ffi::Error(ffi::ErrorCode::kInternal, text);
}

std::atomic<int32_t> first_local_device{0};

// XLA names no device yet. Any that JAX uses will do for finding out early whether the call can be
// planned; a device of another kind plans again in initialize.
ffi::ErrorOr<std::unique_ptr<CallSite>> Instantiate(ffi::Dictionary attributes) {
  auto spec = spec_of(attributes);
  if (!spec.ok()) return ffi::Unexpected(to_ffi(spec.status));
  Visit visit;
  if (!visit.status().ok()) return ffi::Unexpected(to_ffi(visit.status()));
  auto properties = device_properties(first_local_device);
  if (!properties.ok()) return ffi::Unexpected(to_ffi(properties.status));
  auto plan = plan_to_run(spec.value, properties.value);
  if (!plan.ok()) return ffi::Unexpected(to_ffi(plan.status));
  return std::make_unique<CallSite>(std::move(spec.value));
}

// Loading a plan and making a handle happen here, before any command buffer is captured.
ffi::Error Initialize(cudaStream_t stream, int32_t ordinal, CallSite* site, ffi::RemainingArgs,
                      ffi::RemainingRets, ffi::Dictionary) {
  Visit visit;
  if (!visit.status().ok()) return to_ffi(visit.status());
  auto plan = site->on_device(ordinal);
  if (!plan.ok()) return to_ffi(plan.status);
  if (site->spec().clears_rows) {
    if (Status status = load_clear_rows(ordinal); !status.ok()) return to_ffi(status);
  }
  return to_ffi(thread_handle(ordinal, stream).status);
}

// Set in tests: fills results and workspace with NaN before each call, so that whatever the kernel
// leaves unwritten or reads uninitialized shows.
bool poisons() {
  static const bool poison = [] {
    const char* value = std::getenv("ATTN_DISPATCH_POISON");
    return value && *value && *value != '0';
  }();
  return poison;
}

// Gathers the call's pointers and checks their sizes against the plan's.
class Buffers {
 public:
  Buffers(const SdpaSpec& spec, const Plan& plan, const ffi::RemainingArgs& args,
          const ffi::RemainingRets& rets)
      : flags_(!spec.clears_rows ? 0
               : spec.backward   ? 2
                                 : 1) {
    sizes_.reserve(flags_ + plan.buffer_bytes.size());
    if (spec.clears_rows) sizes_ = {spec.flags_q()};
    if (flags_ == 2) sizes_.push_back(spec.flags_kv());
    sizes_.insert(sizes_.end(), plan.buffer_bytes.begin(), plan.buffer_bytes.end());
    first_result_ = args.size();
    const size_t count = args.size() + rets.size();
    if (rets.size() < 1 || count != sizes_.size() + 1 || count > kMaxBuffers) {
      fail("expected " + std::to_string(sizes_.size()) + " buffers and a workspace, got " +
           std::to_string(count));
      return;
    }
    for (size_t i = 0; i < first_result_; ++i) take(i, *args.get<ffi::AnyBuffer>(i));
    for (size_t i = first_result_; i < sizes_.size(); ++i) {
      take(i, **rets.get<ffi::AnyBuffer>(i - first_result_));
    }
    const ffi::AnyBuffer workspace = **rets.get<ffi::AnyBuffer>(rets.size() - 1);
    workspace_ = workspace.untyped_data();
    workspace_bytes_ = static_cast<int64_t>(workspace.size_bytes());
    if (workspace_bytes_ < plan.workspace_bytes) {
      fail("the program was lowered with a workspace of " + std::to_string(workspace_bytes_) +
           " bytes and this device and cuDNN " + std::to_string(cudnn_version()) + " need " +
           std::to_string(plan.workspace_bytes) + "; lower it again here");
    }
  }

  const Status& status() const { return status_; }
  void** of_graph() { return pointers_.data() + flags_; }
  const void* live_queries() const { return pointers_[0]; }
  const void* live_keys() const { return pointers_[1]; }
  void* result(size_t i) const { return pointers_[first_result_ + i]; }
  void* workspace() const { return workspace_; }

  Status poison(cudaStream_t stream) const {
    for (size_t i = first_result_; i < sizes_.size(); ++i) {
      ATTN_RETURN_IF_ERROR(fill(pointers_[i], 0xff, sizes_[i], stream));
    }
    return fill(workspace_, 0xff, workspace_bytes_, stream);
  }

 private:
  void take(size_t i, const ffi::AnyBuffer& buffer) {
    pointers_[i] = buffer.untyped_data();
    const auto bytes = static_cast<int64_t>(buffer.size_bytes());
    if (bytes != sizes_[i]) {
      fail("buffer " + std::to_string(i) + ": expected " + std::to_string(sizes_[i]) +
           " bytes, got " + std::to_string(bytes));
    }
  }

  void fail(std::string message) { status_ = {Code::kWrongCall, std::move(message)}; }

  const size_t flags_;
  size_t first_result_ = 0;
  std::vector<int64_t> sizes_;
  std::array<void*, kMaxBuffers> pointers_{};
  void* workspace_ = nullptr;
  int64_t workspace_bytes_ = 0;
  Status status_;
};

// out, or dq, dk and dv.
Status clear_results(const SdpaSpec& s, const Buffers& buffers, int32_t ordinal,
                     cudaStream_t stream) {
  constexpr int64_t kElementBytes = 2;
  const auto clear = [&](size_t result, bool of_queries, int64_t dim) {
    const int64_t flags = of_queries ? s.flags_q() : s.flags_kv();
    const int64_t elements =
        (of_queries ? s.rows_q() * s.num_heads : s.rows_kv() * s.num_kv_heads) * dim;
    return clear_rows(buffers.result(result),
                      of_queries ? buffers.live_queries() : buffers.live_keys(), flags,
                      elements / flags * kElementBytes, ordinal, stream);
  };
  if (!s.backward) return clear(0, /*of_queries=*/true, s.head_dim_v);
  ATTN_RETURN_IF_ERROR(clear(0, /*of_queries=*/true, s.head_dim));
  ATTN_RETURN_IF_ERROR(clear(1, /*of_queries=*/false, s.head_dim));
  return clear(2, /*of_queries=*/false, s.head_dim_v);
}

ffi::Error Execute(cudaStream_t stream, int32_t ordinal, CallSite* site, ffi::RemainingArgs args,
                   ffi::RemainingRets rets, ffi::Dictionary) {
  auto plan = site->on_device(ordinal);
  if (!plan.ok()) return to_ffi(plan.status);
  auto handle = thread_handle(ordinal, stream);
  if (!handle.ok()) return to_ffi(handle.status);
  Buffers buffers(site->spec(), plan.value->plan(), args, rets);
  if (!buffers.status().ok()) return to_ffi(buffers.status());
  if (poisons()) {
    if (Status status = buffers.poison(stream); !status.ok()) return to_ffi(status);
  }
  Status status = plan.value->execute(handle.value, buffers.of_graph(), buffers.workspace());
  if (status.ok() && site->spec().clears_rows) {
    status = clear_results(site->spec(), buffers, ordinal, stream);
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
