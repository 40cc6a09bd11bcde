// AITER's forward pass, generation "dev18".
#include <mha_fwd.h>

#include <type_traits>

#include "aiter_adapter.h"
#include "aiter_dev18_threads.h"

static_assert(std::is_same_v<decltype(&aiter::mha_fwd),
                             float (*)(aiter::mha_fwd_args, const ck_tile::stream_config&,
                                       std::string, bool, mask_enum, bias_enum, bool, bool, int,
                                       const void*, const void*, bool)>,
              "This AITER's mha_fwd is not the one of amd-aiter 0.1.7.post2.dev18. Build against "
              "that version, or a later one with `attn-dispatch build-aiter --aiter`.");

namespace attn_dispatch::aiter_adapter {
namespace {

constexpr const char* kSubfolder = "fmha_v3_fwd/";

// AITER's loader knows gfx942 GPUs by their number of compute units. On others (MI300A, partitions)
// it loads no kernel and launches it all the same.
bool LoaderKnowsGpu() {
  if (get_gpu_arch() != "gfx942") return true;
  int device = 0, units = 0;
  if (hipGetDevice(&device) != hipSuccess ||
      hipDeviceGetAttribute(&units, hipDeviceAttributeMultiprocessorCount, device) != hipSuccess) {
    return false;
  }
  return units == 304 || units == 80 || units == 64;
}

float Call(const AttnAiterForward& forward, hipStream_t stream, bool use_asm, bool only_ask) {
  const AttnAiterCall& call = forward.call;
  aiter::mha_fwd_args args{};
  FillCommon(call, args);
  args.o_ptr = forward.out;
  args.lse_ptr = forward.lse;
  args.scale_s = call.scale;
  args.scale_p = 1;
  args.scale_o = 1;
  args.logits_soft_cap = forward.logits_soft_cap;
  args.nhead_stride_lse = call.nhead_stride_lse;
  args.batch_stride_lse = call.batch_stride_lse;
  args.min_seqlen_q = 0;
  args.s_randval = false;
  return aiter::mha_fwd(args, ck_tile::stream_config{stream}, DtypeName(call), call.is_group != 0,
                        static_cast<mask_enum>(call.mask), static_cast<bias_enum>(call.bias_kind),
                        /*has_lse=*/forward.lse != nullptr, use_asm, call.bf16_rounding,
                        /*seqstart_q_padding_ptr=*/nullptr, /*seqstart_k_padding_ptr=*/nullptr,
                        /*is_v3_api_check=*/only_ask);
}

bool AsksForAsm(const AttnAiterForward& forward) {
  return forward.call.use_asm != 0 && LoaderKnowsGpu();
}

}  // namespace

const char* Generation() { return "dev18"; }

int Forward(const AttnAiterForward* forward, void* stream, char* message, int32_t size) {
  const HipErrorScope hip_errors;
  // CK may compute what ASM cannot: its out and lse have the same layout.
  const bool use_asm = AsksForAsm(*forward);
  if (use_asm) {
    if (const auto error = AsmFolderError(kSubfolder)) return Fail(message, size, *error);
  }
  const auto launch = [&] {
    return Launch(forward->call, message, size, [&] {
      return Call(*forward, static_cast<hipStream_t>(stream), use_asm, /*only_ask=*/false);
    });
  };
  return use_asm ? RunOnDeviceThread(launch, message, size) : launch();
}

int ForwardTakesAsm(const AttnAiterForward* forward, char* message, int32_t size) {
  return TakesAsm(forward->call, message, size, [&] {
    return AsksForAsm(*forward) ? Call(*forward, nullptr, true, /*only_ask=*/true) : -1;
  });
}

}  // namespace attn_dispatch::aiter_adapter
