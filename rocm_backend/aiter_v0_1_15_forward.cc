// AITER's forward pass, generation "v0.1.15".
#include <mha_fwd.h>

#include <type_traits>

#include "aiter_v0_1_15.h"

static_assert(std::is_same_v<decltype(&aiter::mha_fwd),
                             float (*)(aiter::mha_fwd_args, const ck_tile::stream_config&)>,
              "This AITER's mha_fwd is not the one of AITER v0.1.15 and later. Build against a "
              "later version, or against amd-aiter 0.1.7.post2.dev18.");

namespace attn_dispatch::aiter_adapter {
namespace {

constexpr const char* kSubfolder = "fmha_v3_fwd/";

float Call(const AttnAiterForward& forward, hipStream_t stream, bool only_ask) {
  const AttnAiterCall& call = forward.call;
  aiter::mha_fwd_args args{};
  FillNamed(call, args);
  args.v3_api_check = only_ask;
  args.how_v3_bf16_cvt = call.bf16_rounding;
  args.has_lse = forward.lse != nullptr;
  args.o_ptr = forward.out;
  args.lse_ptr = forward.lse;
  args.scale_s = call.scale;
  args.logits_soft_cap = forward.logits_soft_cap;
  args.nhead_stride_lse = call.nhead_stride_lse;
  args.batch_stride_lse = call.batch_stride_lse;
  // AITER launches workgroups for this many queries of each sequence, and packed kernels read the
  // lengths from the prefix sums.
  if (call.is_group) args.seqlen_q = call.max_seq_len_q;
  const ThrowingScope throwing;
  return aiter::mha_fwd(args, ck_tile::stream_config{stream});
}

// AITER's condition for an ASM kernel tests no logits_soft_cap. Where the totals of packed
// sequences are equal it takes the bottom-right kernel for a top-left mask, as if all lengths were.
std::optional<std::string> Refusal(const AttnAiterForward& forward) {
  const AttnAiterCall& call = forward.call;
  if (auto refusal = AsmRefusal(call)) return refusal;
  if (forward.logits_soft_cap > 0) {
    return "AITER's ASM kernels would ignore logits_soft_cap: " + Describe(call);
  }
  if (call.is_group && call.mask == ATTN_AITER_TOP_LEFT) {
    return "AITER would take a top-left mask of packed sequences for a bottom-right one: " +
           Describe(call);
  }
  return {};
}

}  // namespace

const char* Generation() { return "v0.1.15"; }

int Forward(const AttnAiterForward* forward, void* stream, char* message, int32_t size) {
  const HipErrorScope hip_errors;
  if (const auto refusal = Refusal(*forward)) return Fail(message, size, *refusal);
  if (const auto error = AsmFolderError(kSubfolder)) return Fail(message, size, *error);
  if (const auto error = DeviceError()) return Fail(message, size, *error);
  return Launch(forward->call, message, size, [&] {
    return Call(*forward, static_cast<hipStream_t>(stream), /*only_ask=*/false);
  });
}

int ForwardTakesAsm(const AttnAiterForward* forward, char* message, int32_t size) {
  if (Refusal(*forward)) return 0;
  if (const auto error = DeviceError()) return Fail(message, size, *error), -1;
  return TakesAsm(forward->call, message, size,
                  [&] { return Call(*forward, nullptr, /*only_ask=*/true); });
}

int SplitKv(const AttnAiterSplitKv* split, void*, char* message, int32_t size) {
  return Fail(
      message, size,
      "this build of AITER has no CK, whose split-KV kernels run: " + Describe(split->call));
}

}  // namespace attn_dispatch::aiter_adapter
