#include "fill.h"

#include <algorithm>

#include "narrow.h"

namespace attn_dispatch {
namespace {

using xla::ffi::DataType;

// CK's tile of keys, by the larger head dim: a deterministic backward pass has one dq_acc each.
int64_t keys_per_split(int64_t h, int64_t v) { return std::max(h, v) <= 128 ? 128 : 64; }

int64_t ceil_to(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

// The sizes of a call, and the shapes that follow from them.
struct Sizes {
  bool is_group = false;
  int64_t batch = 0;  // group mode: sequences
  int64_t t = 0, s = 0, n = 0, k = 0, h = 0, v = 0;
  DataType dtype = DataType::INVALID;

  Dims rows(int64_t length, int64_t heads, int64_t dim) const {
    return is_group ? Dims{length, heads, dim} : Dims{batch, length, heads, dim};
  }
  Dims per_row() const { return is_group ? Dims{n, t} : Dims{batch, n, t}; }
};

Sizes take_qkv(Arrays& arrays, AttnAiterCall& call) {
  Sizes sizes;
  const Array q = arrays.operand("q");
  const size_t rank = q.dims.size();
  if (rank != 3 && rank != 4) {
    arrays.fail("q: expected 4 axes, or 3 for packed sequences, got " + std::to_string(rank));
    return sizes;
  }
  if (q.dtype != DataType::F16 && q.dtype != DataType::BF16) {
    arrays.fail("q: expected float16 or bfloat16");
  }
  sizes.is_group = rank == 3;
  sizes.dtype = q.dtype;
  sizes.batch = sizes.is_group ? 0 : q.dims[0];
  sizes.t = q.dims[rank - 3];
  sizes.n = q.dims[rank - 2];
  sizes.h = q.dims[rank - 1];
  const Array k = arrays.operand("k");
  if (k.dims.size() != rank) {
    arrays.fail("k: expected as many axes as q");
    return sizes;
  }
  sizes.s = k.dims[rank - 3];
  sizes.k = k.dims[rank - 2];
  const Array v = arrays.operand("v");
  if (v.dims.size() != rank || k.dims != sizes.rows(sizes.s, sizes.k, sizes.h) ||
      v.dims != sizes.rows(sizes.s, sizes.k, v.dims.back()) || k.dtype != q.dtype ||
      v.dtype != q.dtype || sizes.k == 0 || sizes.n % sizes.k != 0) {
    arrays.fail(
        "k and v: expected q's batch, dtype and head dim, equal lengths and heads, and a "
        "number of heads that divides q's");
    return sizes;
  }
  sizes.v = v.dims.back();
  call.q = q.data;
  call.k = k.data;
  call.v = v.data;
  return sizes;
}

void take_bias(Arrays& arrays, const Sizes& sizes, AttnAiterCall& call) {
  const Narrow narrow(arrays);
  if (call.bias_kind == ATTN_AITER_NO_BIAS) return;
  const Array bias = arrays.operand("bias");
  call.bias = bias.data;
  if (call.bias_kind == ATTN_AITER_ALIBI) {
    if (bias.dtype != DataType::F32 || bias.dims.size() != 2 || bias.dims[1] != sizes.n) {
      arrays.fail("ALiBi slopes: expected float32 [1 or batch, heads]");
      return;
    }
    call.stride_bias = bias.dims[0] == 1 ? 0 : narrow(sizes.n);
    return;
  }
  if (sizes.is_group || bias.dtype != sizes.dtype || bias.dims.size() != 4 ||
      bias.dims[2] != sizes.t || bias.dims[3] != sizes.s) {
    arrays.fail(
        "bias: expected q's dtype and shape [1 or batch, 1 or heads, queries, keys], and no "
        "packed sequences");
    return;
  }
  const int64_t matrix = sizes.t * sizes.s;
  call.stride_bias = narrow(sizes.s);
  call.nhead_stride_bias = bias.dims[1] == 1 ? 0 : narrow(matrix);
  call.batch_stride_bias = bias.dims[0] == 1 ? 0 : narrow(bias.dims[1] * matrix);
}

void take_sequences(Arrays& arrays, const CallSite& site, Sizes& sizes, AttnAiterCall& call) {
  if (!sizes.is_group) {
    if (site.has_gaps || call.max_seq_len_q != sizes.t || call.max_seq_len_kv != sizes.s) {
      arrays.fail("the attributes are those of packed sequences, and q has 4 axes");
    }
    return;
  }
  const Array starts_q = arrays.operand("seqstart_q");
  sizes.batch = starts_q.dims.size() == 1 ? starts_q.dims[0] - 1 : -1;
  if (sizes.batch < 0 || starts_q.dtype != DataType::S32) {
    arrays.fail("seqstart_q: expected int32 [sequences + 1]");
    return;
  }
  const Array starts_k = arrays.operand("seqstart_k", DataType::S32, {sizes.batch + 1});
  call.seqstart_q = static_cast<const int32_t*>(starts_q.data);
  call.seqstart_k = static_cast<const int32_t*>(starts_k.data);
  if (!site.has_gaps) return;
  const Array lengths_q = arrays.operand("seqlen_q", DataType::S32, {sizes.batch});
  const Array lengths_k = arrays.operand("seqlen_k", DataType::S32, {sizes.batch});
  call.seqlen_q = static_cast<const int32_t*>(lengths_q.data);
  call.seqlen_k = static_cast<const int32_t*>(lengths_k.data);
}

// The operands that both directions begin with, and what follows from their shapes.
Sizes fill_call(const CallSite& site, Arrays& arrays, AttnAiterCall& call) {
  call = site.call;
  Sizes sizes = take_qkv(arrays, call);
  take_bias(arrays, sizes, call);
  if (call.dropout_rate > 0) {
    // Two u64, {seed, offset}, as the u32 words that JAX has without x64.
    const Array rng_state = arrays.operand("rng_state", DataType::U32, {4});
    call.rng_state = static_cast<const uint64_t*>(rng_state.data);
  }
  take_sequences(arrays, site, sizes, call);

  const Narrow narrow(arrays);
  call.dtype = sizes.dtype == DataType::F16 ? ATTN_AITER_FP16 : ATTN_AITER_BF16;
  call.is_group = sizes.is_group;
  call.batch = narrow(sizes.batch);
  call.seq_len_q = narrow(sizes.t);
  call.seq_len_kv = narrow(sizes.s);
  call.num_heads = narrow(sizes.n);
  call.num_kv_heads = narrow(sizes.k);
  call.head_dim = narrow(sizes.h);
  call.head_dim_v = narrow(sizes.v);

  call.stride_q = narrow(sizes.n * sizes.h);
  call.stride_k = narrow(sizes.k * sizes.h);
  call.stride_v = narrow(sizes.k * sizes.v);
  call.stride_out = narrow(sizes.n * sizes.v);
  call.nhead_stride_q = narrow(sizes.h);
  call.nhead_stride_k = narrow(sizes.h);
  call.nhead_stride_v = narrow(sizes.v);
  call.nhead_stride_out = narrow(sizes.v);
  call.nhead_stride_lse = narrow(sizes.t);
  if (sizes.is_group) return sizes;
  call.batch_stride_q = narrow(sizes.t * sizes.n * sizes.h);
  call.batch_stride_k = narrow(sizes.s * sizes.k * sizes.h);
  call.batch_stride_v = narrow(sizes.s * sizes.k * sizes.v);
  call.batch_stride_out = narrow(sizes.t * sizes.n * sizes.v);
  call.batch_stride_lse = narrow(sizes.n * sizes.t);
  return sizes;
}

void take_dq_acc(const CallSite& site, Arrays& arrays, const Sizes& sizes, BackwardCall& backward) {
  const Narrow narrow(arrays);
  AttnAiterBackward& call = backward.call;
  Array dq_acc;
  const int64_t batches = sizes.is_group ? 1 : sizes.batch;
  switch (site.accumulator) {
    case ATTN_AITER_SPLIT: {
      const int64_t block = keys_per_split(sizes.h, sizes.v);
      const int64_t splits =
          site.deterministic ? (call.call.max_seq_len_kv + block - 1) / block : 1;
      Dims dims = sizes.rows(sizes.t, sizes.n, sizes.h);
      dims.insert(dims.begin(), splits);
      dq_acc = arrays.result("dq_acc", DataType::F32, dims);
      call.nhead_stride_dq_acc = narrow(sizes.h);
      call.stride_dq_acc = narrow(sizes.n * sizes.h);
      call.batch_stride_dq_acc = sizes.is_group ? 0 : narrow(sizes.t * sizes.n * sizes.h);
      call.split_stride_dq_acc = splits == 1 ? 0 : narrow(batches * sizes.t * sizes.n * sizes.h);
      break;
    }
    case ATTN_AITER_ATOMIC_32: {
      Dims dims = sizes.per_row();
      dims.push_back(sizes.h);
      dq_acc = arrays.result("dq_acc", DataType::F32, dims);
      call.stride_dq_acc = narrow(sizes.h);
      call.nhead_stride_dq_acc = narrow(sizes.t * sizes.h);
      call.batch_stride_dq_acc = sizes.is_group ? 0 : narrow(sizes.n * sizes.t * sizes.h);
      break;
    }
    case ATTN_AITER_ATOMIC_16: {
      const int64_t rows = ceil_to(call.call.max_seq_len_q, 16);
      const int64_t dim = sizes.h == 192 ? 192 : 128;
      dq_acc = arrays.result("dq_acc", sizes.dtype, {sizes.batch, sizes.n, rows, dim});
      call.stride_dq_acc = narrow(dim);
      call.nhead_stride_dq_acc = narrow(rows * dim);
      call.batch_stride_dq_acc = narrow(sizes.n * rows * dim);
      break;
    }
  }
  call.dq_acc = dq_acc.data;
  backward.dq_acc_bytes = dq_acc.bytes;
}

}  // namespace

AttnAiterForward fill_forward(const CallSite& site, Arrays& arrays) {
  AttnAiterForward forward{};
  const Sizes sizes = fill_call(site, arrays, forward.call);
  forward.logits_soft_cap = site.logits_soft_cap;
  forward.out = arrays.result("out", sizes.dtype, sizes.rows(sizes.t, sizes.n, sizes.v)).data;
  if (site.needs_lse) {
    forward.lse = static_cast<float*>(arrays.result("lse", DataType::F32, sizes.per_row()).data);
  }
  return forward;
}

BackwardCall fill_backward(const CallSite& site, Arrays& arrays) {
  BackwardCall backward;
  AttnAiterBackward& call = backward.call;
  const Sizes sizes = fill_call(site, arrays, call.call);
  const Narrow narrow(arrays);
  const Dims out_dims = sizes.rows(sizes.t, sizes.n, sizes.v);
  const DataType dtype = sizes.dtype;
  call.out = arrays.operand("out", dtype, out_dims).data;
  call.lse = static_cast<float*>(arrays.operand("lse", DataType::F32, sizes.per_row()).data);
  call.out_grad = arrays.operand("out_grad", dtype, out_dims).data;
  const Array dq = arrays.result("dq", dtype, sizes.rows(sizes.t, sizes.n, sizes.h));
  call.dq = dq.data;
  backward.dq_bytes = dq.bytes;
  call.dk = arrays.result("dk", dtype, sizes.rows(sizes.s, sizes.n, sizes.h)).data;
  call.dv = arrays.result("dv", dtype, sizes.rows(sizes.s, sizes.n, sizes.v)).data;
  if (site.has_dbias) {
    const Array dbias = arrays.result("dbias", dtype, {sizes.batch, sizes.t, sizes.n, sizes.s});
    call.dbias = dbias.data;
    backward.dbias_bytes = dbias.bytes;
    call.nhead_stride_dbias = narrow(sizes.s);
    call.stride_dbias = narrow(sizes.n * sizes.s);
    call.batch_stride_dbias = narrow(sizes.t * sizes.n * sizes.s);
  }
  call.softmax_d =
      static_cast<float*>(arrays.result("softmax_d", DataType::F32, sizes.per_row()).data);
  call.accumulator = site.accumulator;
  call.is_deterministic = site.deterministic;
  take_dq_acc(site, arrays, sizes, backward);

  call.stride_out_grad = call.call.stride_out;
  call.stride_dq = call.call.stride_q;
  call.stride_dk = narrow(sizes.n * sizes.h);
  call.stride_dv = narrow(sizes.n * sizes.v);
  call.nhead_stride_out_grad = call.call.nhead_stride_out;
  call.nhead_stride_dq = call.call.nhead_stride_q;
  call.nhead_stride_dk = narrow(sizes.h);
  call.nhead_stride_dv = narrow(sizes.v);
  if (sizes.is_group) return backward;
  call.batch_stride_out_grad = call.call.batch_stride_out;
  call.batch_stride_dq = call.call.batch_stride_q;
  call.batch_stride_dk = narrow(sizes.s * sizes.n * sizes.h);
  call.batch_stride_dv = narrow(sizes.s * sizes.n * sizes.v);
  return backward;
}

}  // namespace attn_dispatch
