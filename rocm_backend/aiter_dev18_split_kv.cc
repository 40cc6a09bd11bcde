// AITER's split-KV forward pass, generation "dev18": two kernels of CK's, one that attends within
// each split and one that combines the results.
#include <mha_fwd.h>

#include <type_traits>

#include "aiter_adapter.h"

static_assert(
    std::is_same_v<decltype(&aiter::mha_fwd_splitkv),
                   float (*)(aiter::mha_fwd_splitkv_args, const ck_tile::stream_config&,
                             std::string, bool, mask_enum, bias_enum, bool)>,
    "This AITER's mha_fwd_splitkv is not the one of amd-aiter 0.1.7.post2.dev18, the only one that "
    "this file calls. Build against that version.");

namespace attn_dispatch::aiter_adapter {
namespace {

// With more splits AITER launches no kernel that combines them, and reports no error.
constexpr int32_t kMostSplits = 128;

float Call(const AttnAiterSplitKv& split, hipStream_t stream) {
  const AttnAiterCall& call = split.call;
  aiter::mha_fwd_splitkv_args args{};
  FillShared(call, args);
  args.o_ptr = split.out;
  args.lse_ptr = split.lse;
  args.lse_acc_ptr = split.lse_acc;
  args.o_acc_ptr = split.out_acc;
  args.block_table_ptr = const_cast<int32_t*>(split.page_table);
  args.batch_stride_block_table = split.batch_stride_page_table;
  args.page_block_size = split.page_size;
  args.is_gappy = false;
  args.cache_batch_idx = nullptr;
  args.num_splits = split.num_splits;
  args.scale_s = call.scale;
  args.scale_p = 1;
  args.scale_o = 1;
  args.logits_soft_cap = split.logits_soft_cap;
  args.stride_o_acc = split.stride_out_acc;
  args.nhead_stride_lse = call.nhead_stride_lse;
  args.nhead_stride_lse_acc = split.nhead_stride_lse_acc;
  args.nhead_stride_o_acc = split.nhead_stride_out_acc;
  args.batch_stride_lse = call.batch_stride_lse;
  args.batch_stride_lse_acc = split.batch_stride_lse_acc;
  args.batch_stride_o_acc = split.batch_stride_out_acc;
  args.split_stride_lse_acc = split.split_stride_lse_acc;
  args.split_stride_o_acc = split.split_stride_out_acc;
  return aiter::mha_fwd_splitkv(args, ck_tile::stream_config{stream}, DtypeName(call),
                                call.is_group != 0, static_cast<mask_enum>(call.mask),
                                static_cast<bias_enum>(call.bias_kind),
                                /*has_lse=*/split.lse != nullptr);
}

}  // namespace

int SplitKv(const AttnAiterSplitKv* split, void* stream, char* message, int32_t size) {
  if (split->num_splits < 1 || split->num_splits > kMostSplits) {
    return Fail(message, size,
                "AITER's split-KV kernels take 1 to 128 splits, got " +
                    std::to_string(split->num_splits) + ": " + Describe(split->call));
  }
  return Launch(split->call, message, size,
                [&] { return Call(*split, static_cast<hipStream_t>(stream)); });
}

}  // namespace attn_dispatch::aiter_adapter
