// The handlers of three custom calls, forward, backward and split-KV, each in two stages.
// Instantiate decodes the attributes. Execute makes AITER's struct of the buffers, checks it and
// queues the call. All memory is XLA's: operands, results, and scratch as further results. Nothing
// here allocates or reads device memory.
#include "handlers.h"

#include <hip/hip_runtime_api.h>

#include <atomic>
#include <memory>

#include "aiter_api.h"
#include "array_reader.h"
#include "attribute_reader.h"
#include "call_site.h"
#include "call_structs.h"
#include "environment.h"
#include "ffi_error.h"
#include "kernel_limits.h"
#include "library.h"
#include "spec.h"
#include "stream.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace attn_dispatch {
namespace {

constexpr int32_t kMessageSize = 1024;

ffi::Error to_ffi(const Status& status) { return ffi_error("attn_dispatch AITER: ", status); }

struct CallState {
  static ffi::TypeId id;
  static ffi::TypeInfo info;
  CallSite site;
  const Aiter* aiter = nullptr;
  bool poisons = false;
  std::atomic<bool> is_device_checked{false};
};

ffi::TypeId CallState::id = {};
ffi::TypeInfo CallState::info = ffi::MakeTypeInfo<CallState>();

template <Pass pass>
ffi::ErrorOr<std::unique_ptr<CallState>> Instantiate(ffi::Dictionary dictionary) {
  Attributes attributes;
  AttributeReader reader(dictionary);
#define FIELD(type, name) reader.read<type>(#name, &attributes.name);
  ATTN_AITER_SPEC(FIELD)
#undef FIELD
  if (Status status = reader.status(); !status.ok()) return ffi::Unexpected(to_ffi(status));
  Result<CallSite> site = decode_call_site(attributes, pass);
  if (!site.ok()) return ffi::Unexpected(to_ffi(site.status));
  const Result<bool> poison = poison_requested();
  if (!poison.ok()) return ffi::Unexpected(to_ffi(poison.status));
  auto state = std::make_unique<CallState>();
  state->poisons = poison.value;
  state->site = std::move(site.value);
  state->aiter = loaded_aiter(state->site.arch, state->site.generation);
  if (state->aiter) return state;
  if (const std::string others = loaded_generations(state->site.arch); !others.empty()) {
    return ffi::Unexpected(
        to_ffi({Code::kLibrary, "the program was lowered for AITER's generation " +
                                    state->site.generation + ", and loaded is " + others +
                                    "; lower it again here"}));
  }
  return ffi::Unexpected(
      to_ffi({Code::kLibrary, "its library for \"" + state->site.arch +
                                  "\" is not loaded; build it with `attn-dispatch build-aiter` "
                                  "and call attn_dispatch.register_aiter_calls(\"" +
                                  state->site.arch + "\"), which says what it misses"}));
}

// Refuses a device of another architecture than that for which kernels and scratch were chosen.
Status check_arch(const CallState& state) {
  char arch[64] = "", message[kMessageSize] = "";
  if (state.aiter->calls->device_arch(arch, sizeof arch, message, sizeof message) != 0) {
    return {Code::kDevice, message};
  }
  if (state.site.arch == arch) return {};
  return {Code::kLibrary, "the program was lowered for " + state.site.arch + " and runs on " +
                              arch + "; lower it again here, or with attn_dispatch.target(\"" +
                              arch + "\")"};
}

// Checks the architecture until it was found right once: a device that does not answer may do so in
// the next call.
Status check_device(CallState& state) {
  if (state.is_device_checked) return {};
  ATTN_RETURN_IF_ERROR(check_arch(state));
  state.is_device_checked = true;
  return {};
}

// One execution. Everything is checked before anything is written.
struct Execution {
  hipStream_t stream;
  const CallSite& site;
  const AttnAiter& aiter;
  const Hip& hip;
  ArrayReader arrays;
  const ffi::RemainingRets& results;
  const bool poisons;

  Status forward() {
    const AttnAiterForward call = forward_struct(site, arrays);
    ATTN_RETURN_IF_ERROR(arrays.status());
    ATTN_RETURN_IF_ERROR(check_limits(call));
    ATTN_RETURN_IF_ERROR(poison());
    return launch(aiter.forward, call);
  }

  Status split_kv() {
    const AttnAiterSplitKv call = split_kv_struct(site, arrays);
    ATTN_RETURN_IF_ERROR(arrays.status());
    ATTN_RETURN_IF_ERROR(check_limits(call));
    ATTN_RETURN_IF_ERROR(poison());
    return launch(aiter.split_kv, call);
  }

  Status backward() {
    const BackwardCall backward = backward_struct(site, arrays);
    ATTN_RETURN_IF_ERROR(arrays.status());
    ATTN_RETURN_IF_ERROR(check_limits(backward.call));
    ATTN_RETURN_IF_ERROR(check_kernel(backward.call));
    ATTN_RETURN_IF_ERROR(poison());
    ATTN_RETURN_IF_ERROR(zero_sums(backward));
    return launch(aiter.backward, backward.call);
  }

 private:
  Status fill_bytes(void* data, int value, size_t bytes) {
    const hipError_t status = hip.memset_async(data, value, bytes, stream);
    if (status == hipSuccess) return {};
    (void)hip.get_last_error();  // since HIP 7 the thread's next calls would report it
    return {Code::kDevice, std::string("hipMemsetAsync: ") + hip.error_string(status)};
  }

  Status poison() {
    for (size_t i = 0; poisons && i < results.size(); ++i) {
      const ffi::AnyBuffer buffer = **results.get<ffi::AnyBuffer>(i);
      ATTN_RETURN_IF_ERROR(fill_bytes(buffer.untyped_data(), 0xff, buffer.size_bytes()));
    }
    return {};
  }

  // AITER falls back from ASM kernels to CK by itself, and CK's dq_acc has another layout. So ask
  // which of them it will use before anything is written.
  Status check_kernel(const AttnAiterBackward& backward) {
    if (!backward.call.use_asm) return {};
    char message[kMessageSize] = "";
    const int takes_asm = aiter.backward_takes_asm(&backward, message, sizeof message);
    if (takes_asm == 1) return {};
    return {Code::kUnsupported, takes_asm == 0
                                    ? "this AITER has no ASM kernel for a backward pass that was "
                                      "lowered for one; its scratch memory would not fit CK's"
                                    : message};
  }

  // Zeroes what AITER adds to, and what it leaves unwritten where whole tiles are masked.
  Status zero_sums(const BackwardCall& backward) {
    const AttnAiterBackward& call = backward.call;
    const bool writes_all = call.call.mask == ATTN_AITER_NO_MASK && !call.call.is_group;
    if (!(writes_all && call.is_deterministic)) {
      ATTN_RETURN_IF_ERROR(fill_bytes(call.dq_acc, 0, static_cast<size_t>(call.dq_acc_bytes)));
    }
    // On gfx942 and for head dim 64 the 16-bit kernels add to dq itself.
    if (call.accumulator == ATTN_AITER_ATOMIC_16) {
      ATTN_RETURN_IF_ERROR(fill_bytes(call.dq, 0, backward.dq_bytes));
    }
    if (!call.dbias || writes_all) return {};
    return fill_bytes(call.dbias, 0, backward.dbias_bytes);
  }

  // Queues the call; AITER's sentence if it fails.
  template <typename Call>
  Status launch(int (*run)(const Call*, void*, char*, int32_t), const Call& call) {
    char message[kMessageSize] = "";
    if (run(&call, stream, message, sizeof message) == 0) return {};
    return {Code::kDevice, message};
  }
};

template <Status (Execution::*run)()>
ffi::Error Execute(hipStream_t stream, CallState* state, ffi::RemainingArgs operands,
                   ffi::RemainingRets results, ffi::Dictionary) {
  Status status = check_device(*state);
  if (status.ok()) {
    Execution execution{stream,
                        state->site,
                        *state->aiter->calls,
                        state->aiter->hip,
                        ArrayReader(operands, results),
                        results,
                        state->poisons};
    status = (execution.*run)();
  }
  return to_ffi(status);
}

auto execution() {
  return ffi::Ffi::Bind()
      .Ctx<StreamContext<hipStream_t>>()
      .Ctx<ffi::State<CallState>>()
      .RemainingArgs()
      .RemainingRets()
      .Attrs();
}

auto instantiation() { return ffi::Ffi::BindInstantiate().Attrs(); }

XLA_FFI_DEFINE_HANDLER(kPlanForward, Instantiate<Pass::kForward>, instantiation());
XLA_FFI_DEFINE_HANDLER(kPlanBackward, Instantiate<Pass::kBackward>, instantiation());
XLA_FFI_DEFINE_HANDLER(kPlanSplitKv, Instantiate<Pass::kSplitKv>, instantiation());
XLA_FFI_DEFINE_HANDLER(kForward, Execute<&Execution::forward>, execution(),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kSplitKv, Execute<&Execution::split_kv>, execution(),
                       {ffi::Traits::kCmdBufferCompatible});
// Not command-buffer compatible: CK's backward pass keeps host memory for its launches, which a
// replay of a captured graph frees twice (github.com/ROCm/TransformerEngine/issues/599).
XLA_FFI_DEFINE_HANDLER(kBackward, Execute<&Execution::backward>, execution());

std::map<std::string, void*> stages(void* instantiate, void* execute) {
  return {{"instantiate", instantiate}, {"execute", execute}};
}

}  // namespace

std::map<std::string, void*> forward_handlers() {
  return stages(reinterpret_cast<void*>(kPlanForward), reinterpret_cast<void*>(kForward));
}

std::map<std::string, void*> backward_handlers() {
  return stages(reinterpret_cast<void*>(kPlanBackward), reinterpret_cast<void*>(kBackward));
}

std::map<std::string, void*> split_kv_handlers() {
  return stages(reinterpret_cast<void*>(kPlanSplitKv), reinterpret_cast<void*>(kSplitKv));
}

std::map<std::string, void*> state_type() {
  return {{"type_id", &CallState::id}, {"type_info", &CallState::info}};
}

}  // namespace attn_dispatch
