// The table of functions of aiter_api.h, which call the computations of computations.h.
#include "computations.h"
#include "emulator_buffers.h"
#include "export.h"
#include "hooks.h"

namespace attn_emulator {
namespace {

template <typename Call>
int serve(AttnEmulatorCall kind, const Call& call, void* stream, char* message, int32_t size) {
  remember(call);
  std::string why;
  if (!must_fail(kind, why)) {
    const AttnEmulatorServer serves = server();
    const int result = serves ? serves(kind, &call, message, size) : -1;
    if (result >= 0) {
      attn_emulator_clear_buffers();
      return result;
    }
    why = run(call, stream);
  }
  attn_emulator_clear_buffers();
  return why.empty() ? 0 : failed(why, message, size);
}

int device_arch(char* into, int32_t arch_size, char* message, int32_t message_size) {
  std::string why;
  if (must_fail(why)) return failed(why, message, message_size);
  write(arch(), into, arch_size);
  return 0;
}

int forward(const AttnAiterForward* call, void* stream, char* message, int32_t size) {
  return serve(ATTN_EMULATOR_FORWARD, *call, stream, message, size);
}

int backward(const AttnAiterBackward* call, void* stream, char* message, int32_t size) {
  return serve(ATTN_EMULATOR_BACKWARD, *call, stream, message, size);
}

int split_kv(const AttnAiterSplitKv* call, void* stream, char* message, int32_t size) {
  return serve(ATTN_EMULATOR_SPLIT_KV, *call, stream, message, size);
}

template <typename Call>
int takes_asm(const Call* call, char* message, int32_t size) {
  std::string why;
  if (must_fail(why)) {
    write(why, message, size);
    return -1;
  }
  return asm_answer(call->call);
}

int newer_forward(const AttnAiterForward* call, void* stream, char* message, int32_t size) {
  const NewerScope newer;
  return forward(call, stream, message, size);
}

int newer_backward(const AttnAiterBackward* call, void* stream, char* message, int32_t size) {
  const NewerScope newer;
  return backward(call, stream, message, size);
}

AttnAiter table(const char* generation, decltype(&forward) runs_forward,
                decltype(&backward) runs_backward) {
  return {ATTN_AITER_API_VERSION,
          generation,
          /*arch=*/nullptr,
          device_arch,
          runs_forward,
          runs_backward,
          split_kv,
          takes_asm<AttnAiterForward>,
          takes_asm<AttnAiterBackward>};
}

}  // namespace
}  // namespace attn_emulator

ATTN_EXPORT const AttnAiter* attn_dispatch_aiter(void) {
  namespace emulator = attn_emulator;
  static const AttnAiter first =
      emulator::table(emulator::generation_text, emulator::forward, emulator::backward);
  static const AttnAiter newer = emulator::table(emulator::kNewerGeneration,
                                                 emulator::newer_forward, emulator::newer_backward);
  return emulator::offers_newer() ? &newer : &first;
}
