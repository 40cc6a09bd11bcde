// Three custom calls, forward, backward and split-KV, in two stages: instantiate decodes the
// attributes, execute turns buffers into AITER's pointers and strides, checks them and queues the
// call. All
// memory is XLA's: operands, results, and as further results the scratch. Nothing here allocates or
// reads device memory.
#include "handlers.h"

#include <hip/hip_runtime_api.h>

#include <atomic>
#include <memory>

#include "aiter_api.h"
#include "arrays.h"
#include "attribute_reader.h"
#include "call_site.h"
#include "check.h"
#include "environment.h"
#include "ffi_error.h"
#include "fill.h"
#include "library.h"
#include "spec.h"
#include "stream.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace attn_dispatch {
namespace {

constexpr int32_t kMessageSize = 1024;

ffi::Error to_ffi(const Status& status) { return ffi_error("attn_dispatch AITER: ", status); }

struct State {
  static ffi::TypeId id;
  static ffi::TypeInfo info;
  CallSite site;
  const Aiter* aiter = nullptr;
  bool poisons = false;
  std::atomic<bool> device_is_right{false};
};

ffi::TypeId State::id = {};
ffi::TypeInfo State::info = ffi::MakeTypeInfo<State>();

template <Pass pass>
ffi::ErrorOr<std::unique_ptr<State>> Instantiate(ffi::Dictionary dictionary) {
  Attributes attributes;
  AttributeReader reader(dictionary);
#define FIELD(type, name) reader.take<type>(#name, &attributes.name);
  ATTN_AITER_SPEC(FIELD)
#undef FIELD
  if (Status status = reader.status(); !status.ok()) return ffi::Unexpected(to_ffi(status));
  Result<CallSite> site = decode(attributes, pass);
  if (!site.ok()) return ffi::Unexpected(to_ffi(site.status));
  const Result<bool> poison = poison_requested();
  if (!poison.ok()) return ffi::Unexpected(to_ffi(poison.status));
  auto state = std::make_unique<State>();
  state->poisons = poison.value;
  state->site = std::move(site.value);
  state->aiter = aiter(state->site.arch);
  if (state->aiter) return state;
  return ffi::Unexpected(
      to_ffi({Code::kLibrary, "its library for \"" + state->site.arch +
                                  "\" is not loaded; build it with `attn-dispatch build-aiter` "
                                  "and call attn_dispatch.register_aiter_calls(\"" +
                                  state->site.arch + "\"), which says what it misses"}));
}

// Kernels and scratch were chosen for one architecture; on another they would not fit.
Status wrong_device(const State& state) {
  char arch[64] = "", message[kMessageSize] = "";
  if (state.aiter->calls->device_arch(arch, sizeof arch, message, sizeof message) != 0) {
    return {Code::kDevice, message};
  }
  if (state.site.arch == arch) return {};
  return {Code::kLibrary, "the program was lowered for " + state.site.arch + " and runs on " +
                              arch + "; lower it again here, or with attn_dispatch.target(\"" +
                              arch + "\")"};
}

// Until it is right: a device that does not answer may do so next time.
Status check_device(State& state) {
  if (state.device_is_right) return {};
  ATTN_RETURN_IF_ERROR(wrong_device(state));
  state.device_is_right = true;
  return {};
}

// One execution: everything that can be wrong is looked at before anything is written.
struct Execution {
  hipStream_t stream;
  const CallSite& site;
  const AttnAiter& aiter;
  const Hip& hip;
  Arrays arrays;
  const ffi::RemainingRets& results;
  const bool poisons;

  Status forward() {
    const AttnAiterForward call = fill_forward(site, arrays);
    ATTN_RETURN_IF_ERROR(arrays.status());
    ATTN_RETURN_IF_ERROR(check(call));
    ATTN_RETURN_IF_ERROR(poison());
    return launch(aiter.forward, call);
  }

  Status split_kv() {
    const AttnAiterSplitKv call = fill_split_kv(site, arrays);
    ATTN_RETURN_IF_ERROR(arrays.status());
    ATTN_RETURN_IF_ERROR(check(call));
    ATTN_RETURN_IF_ERROR(poison());
    return launch(aiter.split_kv, call);
  }

  Status backward() {
    const BackwardCall backward = fill_backward(site, arrays);
    ATTN_RETURN_IF_ERROR(arrays.status());
    ATTN_RETURN_IF_ERROR(check(backward.call));
    ATTN_RETURN_IF_ERROR(check_kernel(backward.call));
    ATTN_RETURN_IF_ERROR(poison());
    ATTN_RETURN_IF_ERROR(zero_sums(backward));
    return launch(aiter.backward, backward.call);
  }

 private:
  Status fill_bytes(void* data, int value, size_t bytes) {
    const hipError_t status = hip.memset_async(data, value, bytes, stream);
    if (status == hipSuccess) return {};
    (void)hip.get_last_error();  // since HIP 7 the thread's next calls would find it
    return {Code::kDevice, std::string("hipMemsetAsync: ") + hip.error_string(status)};
  }

  Status poison() {
    for (size_t i = 0; poisons && i < results.size(); ++i) {
      const ffi::AnyBuffer buffer = **results.get<ffi::AnyBuffer>(i);
      ATTN_RETURN_IF_ERROR(fill_bytes(buffer.untyped_data(), 0xff, buffer.size_bytes()));
    }
    return {};
  }

  // The ASM kernels' dq_acc is not CK's, and AITER falls back from one to the other by itself: ask
  // which it will be before anything is written.
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

  // What AITER adds to, or leaves as it is where whole tiles are masked.
  Status zero_sums(const BackwardCall& backward) {
    const AttnAiterBackward& call = backward.call;
    const bool writes_all = call.call.mask == ATTN_AITER_NO_MASK && !call.call.is_group;
    if (!(writes_all && call.is_deterministic)) {
      ATTN_RETURN_IF_ERROR(fill_bytes(call.dq_acc, 0, backward.dq_acc_bytes));
    }
    // On gfx942 and for head dim 64 the 16-bit kernels add to dq itself.
    if (call.accumulator == ATTN_AITER_ATOMIC_16) {
      ATTN_RETURN_IF_ERROR(fill_bytes(call.dq, 0, backward.dq_bytes));
    }
    if (!call.dbias || writes_all) return {};
    return fill_bytes(call.dbias, 0, backward.dbias_bytes);
  }

  // AITER's answer: queued, or a sentence.
  template <typename Call>
  Status launch(int (*run)(const Call*, void*, char*, int32_t), const Call& call) {
    char message[kMessageSize] = "";
    if (run(&call, stream, message, sizeof message) == 0) return {};
    return {Code::kDevice, message};
  }
};

template <Status (Execution::*run)()>
ffi::Error Execute(hipStream_t stream, State* state, ffi::RemainingArgs operands,
                   ffi::RemainingRets results, ffi::Dictionary) {
  Status status = check_device(*state);
  if (status.ok()) {
    Execution execution{
        stream,  state->site,   *state->aiter->calls, state->aiter->hip, Arrays(operands, results),
        results, state->poisons};
    status = (execution.*run)();
  }
  return to_ffi(status);
}

auto execution() {
  return ffi::Ffi::Bind()
      .Ctx<StreamContext>()
      .Ctx<ffi::State<State>>()
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
  return {{"type_id", &State::id}, {"type_info", &State::info}};
}

}  // namespace attn_dispatch
