// What the files of generation "v0.1.15" share: AITER's releases from v0.1.15 on, ASM kernels
// alone.
#pragma once

#include <aiter_hip_common.h>

#include <optional>
#include <string>

#include "aiter_adapter.h"

namespace attn_dispatch::aiter_adapter {

// Why this call must not reach AITER, which would run it wrongly without a word.
std::optional<std::string> AsmRefusal(const AttnAiterCall& call);

// Why AITER cannot launch on the current device. AITER aborts the process if HIP does not answer
// its questions about the device, so the same questions are asked here first.
std::optional<std::string> DeviceError();

// A scope in which AITER throws where it would abort the process otherwise.
class ThrowingScope {
 public:
  ThrowingScope() : before_(aiter_detail::g_aiter_can_throw) {
    aiter_detail::g_aiter_can_throw = true;
  }
  ~ThrowingScope() { aiter_detail::g_aiter_can_throw = before_; }
  ThrowingScope(const ThrowingScope&) = delete;
  ThrowingScope& operator=(const ThrowingScope&) = delete;

 private:
  const bool before_;
};

// Sets the arguments that forward and backward share.
template <typename Args>
void FillNamed(const AttnAiterCall& call, Args& args) {
  FillCommon(call, args);
  args.use_asm_v3 = call.use_asm != 0;
  args.data_type = DtypeName(call);
  args.is_group_mode = call.is_group != 0;
  args.bias_type = call.bias_kind;
  args.cu_seqlen_q_ptr = call.cu_seqlen_q;
  args.cu_seqlen_k_ptr = call.cu_seqlen_k;
}

}  // namespace attn_dispatch::aiter_adapter
