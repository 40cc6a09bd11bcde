// Stands for AITER's header of this name, v0.1.15 to v0.1.20: the fields of its arguments, by name,
// type and order. test_stand_ins.py compares them with AITER's where its sources are.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <variant>

#include "aiter_hip_common.h"

namespace aiter {

struct mha_bwd_args {
  bool use_asm_v3;
  bool v3_atomic_fp32;
  int v3_bf16_cvt;
  bool v3_api_check;
  int hdim_q;
  int hdim_v;
  std::string data_type;
  bool is_group_mode;
  int mask_type;
  int bias_type;
  bool has_dbias;
  bool has_dropout;
  bool is_store_randval;
  bool is_deterministic;
  const void* q_ptr;
  const void* k_ptr;
  const void* v_ptr;
  const void* bias_ptr;
  const void* o_ptr;
  const void* lse_ptr;
  const void* do_ptr;
  void* d_ptr;
  void* rand_val_ptr;
  void* dq_ptr;
  void* dk_ptr;
  void* dv_ptr;
  void* dbias_ptr;
  const void* sink_ptr = nullptr;
  void* d_sink_ptr = nullptr;
  const void* seqstart_q_ptr = nullptr;
  const void* seqstart_k_ptr = nullptr;
  const void* seqlen_q_ptr = nullptr;
  const void* seqlen_k_ptr = nullptr;
  const void* cu_seqlen_q_ptr = nullptr;
  const void* cu_seqlen_k_ptr = nullptr;
  int seqlen_q;
  int seqlen_k;
  int batch;
  int max_seqlen_q;
  int max_seqlen_k;
  int nhead_q;
  int nhead_k;
  float scale;
  int stride_q;
  int stride_k;
  int stride_v;
  int stride_bias;
  int stride_o;
  int stride_randval;
  int stride_do;
  int stride_dq;
  int stride_dk;
  int stride_dv;
  int stride_dbias;
  int nhead_stride_q;
  int nhead_stride_k;
  int nhead_stride_v;
  int nhead_stride_bias;
  int nhead_stride_o;
  int nhead_stride_randval;
  int nhead_stride_do;
  int nhead_stride_lsed;
  int nhead_stride_dq;
  int nhead_stride_dk;
  int nhead_stride_dv;
  int nhead_stride_dbias;
  int batch_stride_q;
  int batch_stride_k;
  int batch_stride_v;
  int batch_stride_bias;
  int batch_stride_o;
  int batch_stride_randval;
  int batch_stride_do;
  int batch_stride_lsed;
  int batch_stride_dq;
  int batch_stride_dk;
  int batch_stride_dv;
  int batch_stride_dbias;
  int window_size_left;
  int window_size_right;
  float p_drop;
  float p_undrop;
  std::variant<std::pair<uint64_t, uint64_t>, std::pair<const void*, const void*>> drop_seed_offset;
  std::function<void*(size_t bytes, bool zero_init)> workspace_alloc;
  std::function<std::shared_ptr<void>(size_t bytes)> pinned_host_alloc;
};

float mha_bwd(mha_bwd_args args, const ck_tile::stream_config& config);

}  // namespace aiter
