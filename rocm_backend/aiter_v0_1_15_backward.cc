// AITER's backward pass, generation "v0.1.15".
#include <mha_bwd.h>

#include <type_traits>

#include "aiter_v0_1_15.h"

namespace attn_dispatch::aiter_adapter {
namespace {

template <typename Args>
concept AsksForScratch =
    requires(Args args, void* (*give)(size_t, bool)) { args.workspace_alloc = give; };

}  // namespace
}  // namespace attn_dispatch::aiter_adapter

static_assert(std::is_same_v<decltype(&aiter::mha_bwd),
                             float (*)(aiter::mha_bwd_args, const ck_tile::stream_config&)> &&
                  attn_dispatch::aiter_adapter::AsksForScratch<aiter::mha_bwd_args>,
              "This AITER's mha_bwd is not the one of AITER v0.1.15 and later. Build against a "
              "later version, or against amd-aiter 0.1.7.post2.dev18.");

namespace attn_dispatch::aiter_adapter {
namespace {

constexpr const char* kSubfolder = "fmha_v3_bwd/";

float Call(const AttnAiterBackward& backward, hipStream_t stream, bool only_ask) {
  const AttnAiterCall& call = backward.call;
  aiter::mha_bwd_args args{};
  FillNamed(call, args);
  FillBackward(backward, args);
  args.v3_api_check = only_ask;
  args.v3_atomic_fp32 = backward.accumulator == ATTN_AITER_ATOMIC_32;
  args.v3_bf16_cvt = call.bf16_rounding;
  // gfx950's kernel for the bottom-right diagonal writes beyond the last key. With equal lengths
  // the other diagonal is the same, and its kernel is right.
  if (call.mask == ATTN_AITER_BOTTOM_RIGHT && !call.is_group && call.seq_len_q == call.seq_len_kv) {
    args.mask_type = ATTN_AITER_TOP_LEFT;
  }
  args.has_dbias = backward.dbias != nullptr;
  args.has_dropout = call.dropout_rate > 0;
  args.is_deterministic = backward.is_deterministic != 0;
  // Asked once, in this thread, before anything is queued. The caller has zeroed the memory.
  args.workspace_alloc = [&backward](size_t bytes, bool) -> void* {
    if (backward.dq_acc_bytes >= 0 && bytes <= static_cast<size_t>(backward.dq_acc_bytes)) {
      return backward.dq_acc;
    }
    throw std::runtime_error("it asks for " + std::to_string(bytes) +
                             " bytes of scratch, and the call has " +
                             std::to_string(backward.dq_acc_bytes));
  };
  const ThrowingScope throwing;
  return aiter::mha_bwd(args, ck_tile::stream_config{stream});
}

}  // namespace

int Backward(const AttnAiterBackward* backward, void* stream, char* message, int32_t size) {
  const HipErrorScope hip_errors;
  if (const auto refusal = AsmRefusal(backward->call)) return Fail(message, size, *refusal);
  if (backward->accumulator == ATTN_AITER_SPLIT) {
    return Fail(message, size, "dq_acc is laid out for CK: " + Describe(backward->call));
  }
  if (const auto error = AsmFolderError(kSubfolder)) return Fail(message, size, *error);
  if (const auto error = DeviceError()) return Fail(message, size, *error);
  return Launch(backward->call, message, size, [&] {
    return Call(*backward, static_cast<hipStream_t>(stream), /*only_ask=*/false);
  });
}

int BackwardTakesAsm(const AttnAiterBackward* backward, char* message, int32_t size) {
  if (AsmRefusal(backward->call) || backward->accumulator == ATTN_AITER_SPLIT) return 0;
  if (const auto error = DeviceError()) return Fail(message, size, *error), -1;
  return TakesAsm(backward->call, message, size,
                  [&] { return Call(*backward, nullptr, /*only_ask=*/true); });
}

}  // namespace attn_dispatch::aiter_adapter
