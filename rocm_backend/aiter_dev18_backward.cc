// AITER's backward pass, generation "dev18".
#include <mha_bwd.h>

#include <type_traits>

#include "aiter_adapter.h"
#include "aiter_dev18_threads.h"

static_assert(std::is_same_v<decltype(&aiter::mha_bwd),
                             float (*)(aiter::mha_bwd_args, const ck_tile::stream_config&,
                                       std::string, bool, mask_enum, bias_enum, bool, bool, bool,
                                       bool, bool, int, const void*, const void*, bool)>,
              "This AITER's mha_bwd is not the one of amd-aiter 0.1.7.post2.dev18. Build against "
              "that version, or a later one with `attn-dispatch build-aiter --aiter`.");

namespace attn_dispatch::aiter_adapter {
namespace {

constexpr const char* kSubfolder = "fmha_v3_bwd/";

float Call(const AttnAiterBackward& backward, hipStream_t stream, bool only_ask) {
  const AttnAiterCall& call = backward.call;
  aiter::mha_bwd_args args{};
  FillCommon(call, args);
  FillBackward(backward, args);
  args.dq_acc_ptr = backward.dq_acc;
  args.stride_dq_acc = backward.stride_dq_acc;
  args.nhead_stride_dq_acc = backward.nhead_stride_dq_acc;
  args.batch_stride_dq_acc = backward.batch_stride_dq_acc;
  args.split_stride_dq_acc = backward.split_stride_dq_acc;

  return aiter::mha_bwd(args, ck_tile::stream_config{stream}, DtypeName(call), call.is_group != 0,
                        static_cast<mask_enum>(call.mask), static_cast<bias_enum>(call.bias_kind),
                        /*has_dbias=*/backward.dbias != nullptr, /*is_store_randval=*/false,
                        backward.is_deterministic != 0, call.use_asm != 0,
                        /*is_v3_atomic_fp32=*/backward.accumulator == ATTN_AITER_ATOMIC_32,
                        call.bf16_rounding, /*seqlen_q_padded=*/nullptr,
                        /*seqlen_k_padded=*/nullptr, /*is_v3_api_check=*/only_ask);
}

// AITER passes its older ASM kernels for packed sequences the number of keys, which it reads from
// seqstart_k on the host. That is device memory, and the stream may not have computed it yet.
bool ReadsDeviceMemory(const AttnAiterCall& call) {
  const bool is_newer = get_gpu_arch() == "gfx950" && call.head_dim > 64 && call.head_dim <= 128;
  return call.is_group != 0 && !is_newer;
}

}  // namespace

int Backward(const AttnAiterBackward* backward, void* stream, char* message, int32_t size) {
  const HipErrorScope hip_errors;
  const bool asm_layout = backward->accumulator != ATTN_AITER_SPLIT;
  if (asm_layout != (backward->call.use_asm != 0)) {
    return Fail(message, size,
                "dq_acc is laid out for the other of AITER's two backward passes: " +
                    Describe(backward->call));
  }
  if (asm_layout) {
    if (const auto error = AsmFolderError(kSubfolder)) return Fail(message, size, *error);
    if (ReadsDeviceMemory(backward->call)) {
      return Fail(message, size,
                  "AITER's ASM kernel for this call needs seqstart_k in host memory: " +
                      Describe(backward->call));
    }
    // Where no ASM kernel fits, AITER falls back to CK, which would write past the end of dq_acc.
    const int takes_asm = BackwardTakesAsm(backward, message, size);
    if (takes_asm < 0) return 1;
    if (takes_asm == 0) {
      return Fail(message, size,
                  "AITER has no ASM kernel for this call: " + Describe(backward->call));
    }
  }
  const auto launch = [&] {
    return Launch(backward->call, message, size, [&] {
      return Call(*backward, static_cast<hipStream_t>(stream), /*only_ask=*/false);
    });
  };
  return asm_layout ? RunOnDeviceThread(launch, message, size) : launch();
}

int BackwardTakesAsm(const AttnAiterBackward* backward, char* message, int32_t size) {
  // AITER divides by the batch stride here, which is 0 in group mode.
  if (backward->accumulator == ATTN_AITER_ATOMIC_16 && backward->call.is_group != 0 &&
      backward->call.head_dim == 64) {
    return 0;
  }
  return TakesAsm(backward->call, message, size,
                  [&] { return Call(*backward, nullptr, /*only_ask=*/true); });
}

}  // namespace attn_dispatch::aiter_adapter
