#include "arrays.h"

namespace attn_emulator {
namespace {

// Lists the arrays of one call; `rows` are query or key rows in the layout of its mode.
class ArrayList {
 public:
  explicit ArrayList(const AttnAiterCall& call)
      : call_(call), batches_(call.is_group ? 1 : call.batch) {
    keys_ = call.is_group ? call.max_seq_len_kv : call.seq_len_kv;
    add_rows("q", call.q, Access::kRead, call.batch_stride_q, call.num_heads, call.nhead_stride_q,
             call.seq_len_q, call.stride_q, call.head_dim);
    add_rows("k", call.k, Access::kRead, call.batch_stride_k, call.num_kv_heads,
             call.nhead_stride_k, call.seq_len_kv, call.stride_k, call.head_dim);
    add_rows("v", call.v, Access::kRead, call.batch_stride_v, call.num_kv_heads,
             call.nhead_stride_v, call.seq_len_kv, call.stride_v, call.head_dim_v);
    if (call.bias_kind == ATTN_AITER_BIAS) {
      add_rows("bias", call.bias, Access::kRead, call.batch_stride_bias, call.num_heads,
               call.nhead_stride_bias, call.seq_len_q, call.stride_bias, keys_);
    }
    if (call.bias_kind == ATTN_AITER_ALIBI) {
      add({"bias",
           call.bias,
           4,
           Access::kRead,
           {{call.batch, call.stride_bias}, {call.num_heads, 1}, {1, 0}, {1, 0}, {1, 0}}});
    }
    add_vector("seqstart_q", call.seqstart_q, 4, call.batch + 1);
    add_vector("seqstart_k", call.seqstart_k, 4, call.batch + 1);
    add_vector("seqlen_q", call.seqlen_q, 4, call.batch);
    add_vector("seqlen_k", call.seqlen_k, 4, call.batch);
    add_vector("cu_seqlen_q", call.cu_seqlen_q, 4, call.batch + 1);
    add_vector("cu_seqlen_k", call.cu_seqlen_k, 4, call.batch + 1);
    if (call.dropout_rate > 0.0f) add_vector("rng_state", call.rng_state, 8, 2);
  }

  void add(const Array& array) {
    if (array.start) arrays.push_back(array);
  }

  void add_vector(const char* name, const void* start, int32_t element_bytes, int64_t size) {
    add({name, start, element_bytes, Access::kRead, {{size, 1}, {1, 0}, {1, 0}, {1, 0}, {1, 0}}});
  }

  void add_rows(const char* name, const void* start, Access access, int64_t batch_stride,
                int64_t heads, int64_t nhead_stride, int64_t rows, int64_t stride, int64_t width,
                int32_t element_bytes = 2, Axis split = {1, 0}) {
    add({name,
         start,
         element_bytes,
         access,
         {{batches_, batch_stride}, {heads, nhead_stride}, {rows, stride}, {width, 1}, split}});
  }

  void add_lse(const char* name, const float* start, Access access) {
    add_rows(name, start, access, call_.batch_stride_lse, call_.num_heads, call_.nhead_stride_lse,
             call_.seq_len_q, 1, 1, 4);
  }

  void add_dbias(const AttnAiterBackward& backward) {
    add_rows("dbias", backward.dbias, Access::kUpdated, backward.batch_stride_dbias,
             call_.num_heads, backward.nhead_stride_dbias, call_.seq_len_q, backward.stride_dbias,
             keys_);
  }

  std::vector<Array> arrays;

 private:
  const AttnAiterCall& call_;
  int64_t batches_;
  int64_t keys_;
};

void add_dq_acc(const AttnAiterBackward& backward, ArrayList& list) {
  const AttnAiterCall& call = backward.call;
  const bool is_16 = backward.accumulator == ATTN_AITER_ATOMIC_16;
  const int64_t batch = call.is_group && !is_16 ? 1 : call.batch;
  const int64_t rows = is_16 ? (call.max_seq_len_q + 15) / 16 * 16 : call.seq_len_q;
  const int64_t width = is_16 ? backward.stride_dq_acc : call.head_dim;
  const int64_t splits = backward.is_deterministic ? blocks_of(call, call.max_seq_len_kv) : 1;
  list.add({"dq_acc",
            backward.dq_acc,
            is_16 ? 2 : 4,
            Access::kUpdated,
            {{batch, backward.batch_stride_dq_acc},
             {call.num_heads, backward.nhead_stride_dq_acc},
             {rows, backward.stride_dq_acc},
             {width, 1},
             {splits, backward.split_stride_dq_acc}}});
}

}  // namespace

std::vector<Array> arrays_of(const AttnAiterForward& forward) {
  const AttnAiterCall& call = forward.call;
  ArrayList list(call);
  list.add_rows("out", forward.out, Access::kWritten, call.batch_stride_out, call.num_heads,
                call.nhead_stride_out, call.seq_len_q, call.stride_out, call.head_dim_v);
  list.add_lse("lse", forward.lse, Access::kWritten);
  return list.arrays;
}

std::vector<Array> arrays_of(const AttnAiterBackward& backward, bool is_direct) {
  const AttnAiterCall& call = backward.call;
  ArrayList list(call);
  list.add_rows("out", backward.out, Access::kRead, call.batch_stride_out, call.num_heads,
                call.nhead_stride_out, call.seq_len_q, call.stride_out, call.head_dim_v);
  list.add_lse("lse", backward.lse, Access::kRead);
  list.add_lse("softmax_d", backward.softmax_d, Access::kWritten);
  list.add_rows("out_grad", backward.out_grad, Access::kRead, backward.batch_stride_out_grad,
                call.num_heads, backward.nhead_stride_out_grad, call.seq_len_q,
                backward.stride_out_grad, call.head_dim_v);
  list.add_rows("dq", backward.dq, is_direct ? Access::kUpdated : Access::kWritten,
                backward.batch_stride_dq, call.num_heads, backward.nhead_stride_dq, call.seq_len_q,
                backward.stride_dq, call.head_dim);
  list.add_rows("dk", backward.dk, Access::kWritten, backward.batch_stride_dk, call.num_heads,
                backward.nhead_stride_dk, call.seq_len_kv, backward.stride_dk, call.head_dim);
  list.add_rows("dv", backward.dv, Access::kWritten, backward.batch_stride_dv, call.num_heads,
                backward.nhead_stride_dv, call.seq_len_kv, backward.stride_dv, call.head_dim_v);
  list.add_dbias(backward);
  add_dq_acc(backward, list);
  return list.arrays;
}

std::vector<Array> arrays_of(const AttnAiterSplitKv& split) {
  const AttnAiterCall& call = split.call;
  const int64_t batch = call.batch, heads = call.num_heads, rows = call.seq_len_q;
  const bool is_paged = split.page_table != nullptr;
  const int64_t blocks = is_paged ? split.num_pages : batch;
  const int64_t block = is_paged ? split.page_size : call.seq_len_kv;
  std::vector<Array> arrays;
  const auto add = [&](const Array& array) {
    if (array.start) arrays.push_back(array);
  };
  const auto add_vector = [&](const char* name, const void* start, Axis outer, Axis inner) {
    add({name, start, 4, Access::kRead, {outer, inner, {1, 0}, {1, 0}, {1, 0}}});
  };
  const auto add_keys = [&](const char* name, const void* start, int64_t block_stride,
                            int64_t nhead_stride, int64_t stride, int64_t width) {
    add({name,
         start,
         2,
         Access::kRead,
         {{blocks, block_stride},
          {call.num_kv_heads, nhead_stride},
          {block, stride},
          {width, 1},
          {1, 0}}});
  };
  const auto add_rows = [&](const char* name, const void* start, int32_t bytes, Access access,
                            int64_t batch_stride, int64_t nhead_stride, int64_t stride,
                            int64_t width, Axis part = {1, 0}) {
    add({name,
         start,
         bytes,
         access,
         {{batch, batch_stride}, {heads, nhead_stride}, {rows, stride}, {width, 1}, part}});
  };
  add_rows("q", call.q, 2, Access::kRead, call.batch_stride_q, call.nhead_stride_q, call.stride_q,
           call.head_dim);
  add_keys("k", call.k, call.batch_stride_k, call.nhead_stride_k, call.stride_k, call.head_dim);
  add_keys("v", call.v, call.batch_stride_v, call.nhead_stride_v, call.stride_v, call.head_dim_v);
  if (call.bias_kind == ATTN_AITER_ALIBI) {
    add_vector("bias", call.bias, {batch, call.stride_bias}, {heads, 1});
  }
  add_vector("seqlen_k", call.seqlen_k, {1, 0}, {batch, 1});
  if (is_paged) {
    add_vector("page_table", split.page_table, {batch, split.batch_stride_page_table},
               {call.seq_len_kv / split.page_size, 1});
  }
  add_rows("out", split.out, 2, Access::kWritten, call.batch_stride_out, call.nhead_stride_out,
           call.stride_out, call.head_dim_v);
  add_rows("lse", split.lse, 4, Access::kWritten, call.batch_stride_lse, call.nhead_stride_lse, 1,
           1);
  add_rows("lse_acc", split.lse_acc, 4, Access::kWritten, split.batch_stride_lse_acc,
           split.nhead_stride_lse_acc, 1, 1, {split.num_splits, split.split_stride_lse_acc});
  add_rows("out_acc", split.out_acc, 4, Access::kWritten, split.batch_stride_out_acc,
           split.nhead_stride_out_acc, split.stride_out_acc, call.head_dim_v,
           {split.num_splits, split.split_stride_out_acc});
  return arrays;
}

}  // namespace attn_emulator
