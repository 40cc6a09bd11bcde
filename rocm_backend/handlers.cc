// Three custom calls, forward, backward and split-KV, in two stages: instantiate decodes the
// attributes, execute turns buffers into AITER's pointers and strides and queues the call. All
// memory is XLA's: operands, results, and as further results the scratch. Nothing here allocates or
// reads device memory.
#include "handlers.h"

#include <hip/hip_runtime_api.h>

#include <cstdlib>
#include <memory>
#include <mutex>

#include "aiter_api.h"
#include "arrays.h"
#include "call_site.h"
#include "fill.h"
#include "library.h"
#include "spec.h"
#include "stream.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

#define FIRST(type, name) xla::ffi::StructMember<type>(#name)
#define FIELD(type, name) , FIRST(type, name)
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(attn_dispatch::Attributes, ATTN_AITER_SPEC(FIRST, FIELD));
#undef FIRST
#undef FIELD

namespace attn_dispatch {
namespace {

constexpr int32_t kMessageSize = 1024;

ffi::Error failure(ffi::ErrorCode code, const std::string& sentence) {
  return ffi::Error(code, "attn_dispatch AITER: " + sentence);
}

struct State {
  static ffi::TypeId id;
  static ffi::TypeInfo info;
  CallSite site;
  std::once_flag device_checked;
  std::string wrong_device;
};

ffi::TypeId State::id = {};
ffi::TypeInfo State::info = ffi::MakeTypeInfo<State>();

ffi::ErrorOr<std::unique_ptr<State>> Instantiate(Attributes attributes) {
  if (!aiter()) {
    return ffi::Unexpected(
        failure(ffi::ErrorCode::kFailedPrecondition,
                "its library is not loaded; build it with `attn-dispatch build-aiter` and call "
                "attn_dispatch.register_aiter_calls(), which says what it misses"));
  }
  auto state = std::make_unique<State>();
  if (std::string wrong = decode(attributes, state->site); !wrong.empty()) {
    return ffi::Unexpected(failure(ffi::ErrorCode::kInvalidArgument, wrong));
  }
  return state;
}

// Kernels and scratch were chosen for one architecture; on another they would not fit.
std::string wrong_device(const CallSite& site) {
  char arch[64] = "", message[kMessageSize] = "";
  if (aiter()->device_arch(arch, sizeof arch, message, sizeof message) != 0) return message;
  if (site.arch == arch) return "";
  return "the program was lowered for " + site.arch + " and runs on " + arch +
         "; lower it again here, or with attn_dispatch.target(\"" + arch + "\")";
}

ffi::Error check_device(State& state) {
  std::call_once(state.device_checked, [&] { state.wrong_device = wrong_device(state.site); });
  if (state.wrong_device.empty()) return ffi::Error::Success();
  return failure(ffi::ErrorCode::kFailedPrecondition, state.wrong_device);
}

ffi::Error fill_bytes(void* data, int value, size_t bytes, hipStream_t stream) {
  const hipError_t status = hip().memset_async(data, value, bytes, stream);
  if (status == hipSuccess) return ffi::Error::Success();
  return failure(ffi::ErrorCode::kInternal,
                 std::string("hipMemsetAsync: ") + hip().error_string(status));
}

// Set in tests: fills results and scratch with NaN first, so that whatever a kernel leaves
// unwritten or reads uninitialized shows.
ffi::Error poison(const ffi::RemainingRets& results, hipStream_t stream) {
  static const bool wanted = [] {
    const char* value = std::getenv("ATTN_DISPATCH_POISON");
    return value && *value && *value != '0';
  }();
  for (size_t i = 0; wanted && i < results.size(); ++i) {
    const ffi::AnyBuffer buffer = **results.get<ffi::AnyBuffer>(i);
    auto error = fill_bytes(buffer.untyped_data(), 0xff, buffer.size_bytes(), stream);
    if (error.failure()) return error;
  }
  return ffi::Error::Success();
}

ffi::Error Forward(hipStream_t stream, State* state, ffi::RemainingArgs operands,
                   ffi::RemainingRets results, ffi::Dictionary) {
  if (auto error = check_device(*state); error.failure()) return error;
  Arrays arrays(operands, results);
  const AttnAiterForward forward = fill_forward(state->site, arrays);
  if (!arrays.error().empty()) return failure(ffi::ErrorCode::kInvalidArgument, arrays.error());
  if (auto error = poison(results, stream); error.failure()) return error;
  char message[kMessageSize] = "";
  if (aiter()->forward(&forward, stream, message, sizeof message) != 0) {
    return failure(ffi::ErrorCode::kInternal, message);
  }
  return ffi::Error::Success();
}

ffi::Error SplitKv(hipStream_t stream, State* state, ffi::RemainingArgs operands,
                   ffi::RemainingRets results, ffi::Dictionary) {
  if (auto error = check_device(*state); error.failure()) return error;
  Arrays arrays(operands, results);
  const AttnAiterSplitKv split = fill_split_kv(state->site, arrays);
  if (!arrays.error().empty()) return failure(ffi::ErrorCode::kInvalidArgument, arrays.error());
  if (auto error = poison(results, stream); error.failure()) return error;
  char message[kMessageSize] = "";
  if (aiter()->split_kv(&split, stream, message, sizeof message) != 0) {
    return failure(ffi::ErrorCode::kInternal, message);
  }
  return ffi::Error::Success();
}

// The ASM kernels' dq_acc is not CK's, and AITER falls back from one to the other by itself: ask
// which it will be before anything is written.
ffi::Error check_kernel(const AttnAiterBackward& backward) {
  if (!backward.call.use_asm) return ffi::Error::Success();
  char message[kMessageSize] = "";
  const int takes_asm = aiter()->backward_takes_asm(&backward, message, sizeof message);
  if (takes_asm == 1) return ffi::Error::Success();
  return failure(ffi::ErrorCode::kInternal,
                 takes_asm == 0
                     ? "this AITER has no ASM kernel for a backward pass that was lowered "
                       "for one; its scratch memory would not fit CK's"
                     : message);
}

// What AITER adds to, or leaves as it is where whole tiles are masked.
ffi::Error zero_sums(const BackwardCall& backward, hipStream_t stream) {
  const AttnAiterBackward& call = backward.call;
  const bool writes_all = call.call.mask == ATTN_AITER_NO_MASK && !call.call.is_group;
  if (!(writes_all && call.is_deterministic)) {
    auto error = fill_bytes(call.dq_acc, 0, backward.dq_acc_bytes, stream);
    if (error.failure()) return error;
  }
  // On gfx942 and for head dim 64 the 16-bit kernels add to dq itself.
  if (call.accumulator == ATTN_AITER_ATOMIC_16) {
    auto error = fill_bytes(call.dq, 0, backward.dq_bytes, stream);
    if (error.failure()) return error;
  }
  if (!call.dbias || writes_all) return ffi::Error::Success();
  return fill_bytes(call.dbias, 0, backward.dbias_bytes, stream);
}

ffi::Error Backward(hipStream_t stream, State* state, ffi::RemainingArgs operands,
                    ffi::RemainingRets results, ffi::Dictionary) {
  if (auto error = check_device(*state); error.failure()) return error;
  Arrays arrays(operands, results);
  const BackwardCall backward = fill_backward(state->site, arrays);
  if (!arrays.error().empty()) return failure(ffi::ErrorCode::kInvalidArgument, arrays.error());
  const AttnAiterBackward& call = backward.call;
  if (auto error = check_kernel(call); error.failure()) return error;
  if (auto error = poison(results, stream); error.failure()) return error;
  if (auto error = zero_sums(backward, stream); error.failure()) return error;
  char message[kMessageSize] = "";
  if (aiter()->backward(&call, stream, message, sizeof message) != 0) {
    return failure(ffi::ErrorCode::kInternal, message);
  }
  return ffi::Error::Success();
}

auto execution() {
  return ffi::Ffi::Bind()
      .Ctx<StreamContext>()
      .Ctx<ffi::State<State>>()
      .RemainingArgs()
      .RemainingRets()
      .Attrs();
}

XLA_FFI_DEFINE_HANDLER(kInstantiate, Instantiate, ffi::Ffi::BindInstantiate().Attrs<Attributes>());
XLA_FFI_DEFINE_HANDLER(kForward, Forward, execution(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kSplitKv, SplitKv, execution(), {ffi::Traits::kCmdBufferCompatible});
// Not command-buffer compatible: CK's backward pass keeps host memory for its launches, which a
// replay of a captured graph frees twice (github.com/ROCm/TransformerEngine/issues/599).
XLA_FFI_DEFINE_HANDLER(kBackward, Backward, execution());

std::map<std::string, void*> stages(void* execute) {
  return {{"instantiate", reinterpret_cast<void*>(kInstantiate)}, {"execute", execute}};
}

}  // namespace

std::map<std::string, void*> forward_handlers() {
  return stages(reinterpret_cast<void*>(kForward));
}

std::map<std::string, void*> backward_handlers() {
  return stages(reinterpret_cast<void*>(kBackward));
}

std::map<std::string, void*> split_kv_handlers() {
  return stages(reinterpret_cast<void*>(kSplitKv));
}

std::map<std::string, void*> state_type() {
  return {{"type_id", &State::id}, {"type_info", &State::info}};
}

}  // namespace attn_dispatch
