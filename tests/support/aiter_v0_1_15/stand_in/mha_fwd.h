// Stands for AITER's header of this name, v0.1.15 to v0.1.20: the fields of its arguments, by name,
// type and order. test_stand_ins.py compares them with AITER's where its sources are.
#pragma once

#include <string>
#include <utility>
#include <variant>

#include "aiter_hip_common.h"

namespace aiter {

struct mha_fwd_args {
  bool use_asm_v3;
  bool v3_api_check;
  int how_v3_bf16_cvt;
  std::string data_type;
  bool is_group_mode;
  int bias_type;
  bool has_lse;
  int qscale_type;
  bool has_sink = false;
  const void* q_ptr;
  const void* k_ptr;
  const void* v_ptr;
  const void* bias_ptr;
  const void* q_descale_ptr;
  const void* k_descale_ptr;
  const void* v_descale_ptr;
  void* rand_val_ptr;
  void* lse_ptr;
  void* o_ptr;
  const void* seqstart_q_ptr = nullptr;
  const void* seqstart_k_ptr = nullptr;
  const void* seqlen_q_ptr = nullptr;
  const void* seqlen_k_ptr = nullptr;
  const void* cu_seqlen_q_ptr = nullptr;
  const void* cu_seqlen_k_ptr = nullptr;
  const void* block_scale_seqstart_q_ptr;
  const void* block_scale_seqstart_k_ptr;
  const void* sink_ptr;
  ck_tile::index_t seqlen_q;
  ck_tile::index_t seqlen_k;
  ck_tile::index_t batch;
  ck_tile::index_t max_seqlen_q;
  ck_tile::index_t hdim_q;
  ck_tile::index_t hdim_v;
  ck_tile::index_t nhead_q;
  ck_tile::index_t nhead_k;
  float scale_s;
  float logits_soft_cap;
  ck_tile::index_t stride_q;
  ck_tile::index_t stride_k;
  ck_tile::index_t stride_v;
  ck_tile::index_t stride_bias;
  ck_tile::index_t stride_randval;
  ck_tile::index_t stride_o;
  ck_tile::index_t nhead_stride_q;
  ck_tile::index_t nhead_stride_k;
  ck_tile::index_t nhead_stride_v;
  ck_tile::index_t nhead_stride_bias;
  ck_tile::index_t nhead_stride_randval;
  ck_tile::index_t nhead_stride_lse;
  ck_tile::index_t nhead_stride_o;
  ck_tile::index_t nhead_stride_q_descale;
  ck_tile::index_t nhead_stride_k_descale;
  ck_tile::index_t nhead_stride_v_descale;
  ck_tile::index_t batch_stride_q;
  ck_tile::index_t batch_stride_k;
  ck_tile::index_t batch_stride_v;
  ck_tile::index_t batch_stride_bias;
  ck_tile::index_t batch_stride_randval;
  ck_tile::index_t batch_stride_lse;
  ck_tile::index_t batch_stride_o;
  ck_tile::index_t batch_stride_q_descale;
  ck_tile::index_t batch_stride_k_descale;
  ck_tile::index_t batch_stride_v_descale;
  ck_tile::index_t window_size_left;
  ck_tile::index_t window_size_right;
  ck_tile::index_t sink_size;
  ck_tile::index_t mask_type;
  ck_tile::index_t min_seqlen_q;
  float p_drop;
  bool s_randval;
  std::variant<std::pair<uint64_t, uint64_t>, std::pair<const void*, const void*>> drop_seed_offset;
  ck_tile::index_t block_scale_size_q;
  ck_tile::index_t block_scale_size_kv;
};

float mha_fwd(mha_fwd_args args, const ck_tile::stream_config& config);

}  // namespace aiter
