#include "call_structs.h"

#include <algorithm>

namespace attn_dispatch {
namespace {

using xla::ffi::DataType;

// The keys in a tile of CK's, by the larger head dim. A deterministic backward pass has one dq_acc
// for each tile.
int64_t keys_per_split(int64_t h, int64_t v) { return std::max(h, v) <= 128 ? 128 : 64; }

int64_t ceil_to(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

// The sizes of a call, t, s, n, k, h and v as in the shapes below, and shapes made of them.
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

struct Rows {
  const char* name;
  int64_t length, heads, dim;
};

Sizes read_qkv(ArrayReader& arrays, AttnAiterCall& call) {
  Sizes sizes;
  const Array q = arrays.operand("q");
  const size_t rank = q.dims.size();
  const bool is_16_bit = q.dtype == DataType::F16 || q.dtype == DataType::BF16;
  if (!is_16_bit || (rank != 3 && rank != 4)) {
    arrays.fail("q", "float16 or bfloat16 of 4 axes, or of 3 for packed sequences", describe(q));
    return sizes;
  }
  sizes.is_group = rank == 3;
  sizes.dtype = q.dtype;
  sizes.batch = sizes.is_group ? 0 : q.dims[0];
  sizes.t = q.dims[rank - 3];
  sizes.n = q.dims[rank - 2];
  sizes.h = q.dims[rank - 1];
  const Array k = arrays.operand("k");
  if (k.dims.size() == rank) {
    sizes.s = k.dims[rank - 3];
    sizes.k = k.dims[rank - 2];
  }
  if (k.dtype != q.dtype || k.dims != sizes.rows(sizes.s, sizes.k, sizes.h)) {
    arrays.fail("k", "q's dtype, batch and head dim, with " + describe(q), describe(k));
    return sizes;
  }
  const Array v = arrays.operand("v");
  if (v.dims.size() == rank) sizes.v = v.dims.back();
  if (v.dtype != q.dtype || v.dims != sizes.rows(sizes.s, sizes.k, sizes.v)) {
    arrays.fail("v", "k's dtype and shape but for the head dim, with " + describe(k), describe(v));
    return sizes;
  }
  call.q = q.data;
  call.k = k.data;
  call.v = v.data;
  return sizes;
}

// Called once all sizes are known: the number of sequences comes after the bias among the operands.
void set_bias(ArrayReader& arrays, const Sizes& sizes, const Array& bias, AttnAiterCall& call) {
  if (call.bias_kind == ATTN_AITER_NO_BIAS) return;
  const bool is_shared = !bias.dims.empty() && bias.dims[0] == 1;  // one for all batch rows
  call.bias = bias.data;
  if (call.bias_kind == ATTN_AITER_ALIBI) {
    const Dims expected = {is_shared ? 1 : sizes.batch, sizes.n};
    if (bias.dtype != DataType::F32 || bias.dims != expected) {
      arrays.fail("bias",
                  describe(DataType::F32, {sizes.batch, sizes.n}) +
                      " of ALiBi slopes, of which the first axis may be 1",
                  describe(bias));
    }
    call.stride_bias = is_shared ? 0 : arrays.stride("bias", {sizes.n});
    return;
  }
  const bool is_shared_by_heads = bias.dims.size() == 4 && bias.dims[1] == 1;
  const int64_t heads = is_shared_by_heads ? 1 : sizes.n;
  const Dims expected = {is_shared ? 1 : sizes.batch, heads, sizes.t, sizes.s};
  if (sizes.is_group || bias.dtype != sizes.dtype || bias.dims != expected) {
    arrays.fail("bias",
                describe(sizes.dtype, {sizes.batch, sizes.n, sizes.t, sizes.s}) +
                    ", of which the first two axes may be 1, and no packed sequences",
                describe(bias));
  }
  call.stride_bias = arrays.stride("bias", {sizes.s});
  call.nhead_stride_bias = is_shared_by_heads ? 0 : arrays.stride("bias", {sizes.t, sizes.s});
  call.batch_stride_bias = is_shared ? 0 : arrays.stride("bias", {heads, sizes.t, sizes.s});
}

void read_sequences(ArrayReader& arrays, const CallSite& site, Sizes& sizes, AttnAiterCall& call) {
  if (!sizes.is_group) return;
  const Array starts_q = arrays.operand("seqstart_q");
  if (starts_q.dtype != DataType::S32 || starts_q.dims.size() != 1 || starts_q.dims[0] < 2) {
    arrays.fail("seqstart_q", "int32 of one axis, of 2 or more", describe(starts_q));
    return;
  }
  sizes.batch = starts_q.dims[0] - 1;
  const Array starts_k = arrays.operand("seqstart_k", DataType::S32, {sizes.batch + 1});
  call.seqstart_q = static_cast<const int32_t*>(starts_q.data);
  call.seqstart_k = static_cast<const int32_t*>(starts_k.data);
  if (!site.has_gaps) return;
  if (site.takes_prefix_sums) {
    const Dims dims = {sizes.batch + 1};
    call.cu_seqlen_q =
        static_cast<const int32_t*>(arrays.operand("cu_seqlen_q", DataType::S32, dims).data);
    call.cu_seqlen_k =
        static_cast<const int32_t*>(arrays.operand("cu_seqlen_k", DataType::S32, dims).data);
    return;
  }
  const Array lengths_q = arrays.operand("seqlen_q", DataType::S32, {sizes.batch});
  const Array lengths_k = arrays.operand("seqlen_k", DataType::S32, {sizes.batch});
  call.seqlen_q = static_cast<const int32_t*>(lengths_q.data);
  call.seqlen_k = static_cast<const int32_t*>(lengths_k.data);
}

// Reads the operands with which both directions begin, and sets what follows from their shapes.
Sizes read_call(const CallSite& site, ArrayReader& arrays, AttnAiterCall& call) {
  call = site.call;
  Sizes sizes = read_qkv(arrays, call);
  const bool has_bias = call.bias_kind != ATTN_AITER_NO_BIAS;
  const Array bias = has_bias ? arrays.operand("bias") : Array{};
  if (call.dropout_rate > 0) {
    // Two uint64, {seed, offset}, as uint32 words: JAX has no uint64 without x64.
    const Array rng_state = arrays.operand("rng_state", DataType::U32, {4});
    call.rng_state = static_cast<const uint64_t*>(rng_state.data);
  }
  read_sequences(arrays, site, sizes, call);
  if (!sizes.is_group && site.has_gaps) {
    arrays.fail("has_gaps", "false where q has 4 axes", "true");
  }
  set_bias(arrays, sizes, bias, call);

  call.dtype = sizes.dtype == DataType::F16 ? ATTN_AITER_FP16 : ATTN_AITER_BF16;
  call.is_group = sizes.is_group;
  call.batch = static_cast<int32_t>(sizes.batch);  // every axis fits in an int32
  call.seq_len_q = static_cast<int32_t>(sizes.t);
  call.seq_len_kv = static_cast<int32_t>(sizes.s);
  call.num_heads = static_cast<int32_t>(sizes.n);
  call.num_kv_heads = static_cast<int32_t>(sizes.k);
  call.head_dim = static_cast<int32_t>(sizes.h);
  call.head_dim_v = static_cast<int32_t>(sizes.v);

  call.stride_q = arrays.stride("q", {sizes.n, sizes.h});
  call.stride_k = arrays.stride("k", {sizes.k, sizes.h});
  call.stride_v = arrays.stride("v", {sizes.k, sizes.v});
  call.stride_out = arrays.stride("out", {sizes.n, sizes.v});
  call.nhead_stride_q = arrays.stride("q", {sizes.h});
  call.nhead_stride_k = arrays.stride("k", {sizes.h});
  call.nhead_stride_v = arrays.stride("v", {sizes.v});
  call.nhead_stride_out = arrays.stride("out", {sizes.v});
  call.nhead_stride_lse = arrays.stride("lse", {sizes.t});
  if (sizes.is_group) {
    // A kernel counts the elements of one sequence, from its start, in 32 bits.
    for (const auto& [name, length, heads, dim] : {Rows{"q", call.max_seq_len_q, sizes.n, sizes.h},
                                                   {"k", call.max_seq_len_kv, sizes.n, sizes.h},
                                                   {"v", call.max_seq_len_kv, sizes.n, sizes.v},
                                                   {"out", call.max_seq_len_q, sizes.n, sizes.v}}) {
      arrays.stride(name, {length, heads, dim});
    }
    return sizes;
  }
  call.batch_stride_q = arrays.stride("q", {sizes.t, sizes.n, sizes.h});
  call.batch_stride_k = arrays.stride("k", {sizes.s, sizes.k, sizes.h});
  call.batch_stride_v = arrays.stride("v", {sizes.s, sizes.k, sizes.v});
  call.batch_stride_out = arrays.stride("out", {sizes.t, sizes.n, sizes.v});
  call.batch_stride_lse = arrays.stride("lse", {sizes.n, sizes.t});
  return sizes;
}

void read_dq_acc(const CallSite& site, ArrayReader& arrays, const Sizes& sizes,
                 BackwardCall& backward) {
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
      call.nhead_stride_dq_acc = arrays.stride("dq_acc", {sizes.h});
      call.stride_dq_acc = arrays.stride("dq_acc", {sizes.n, sizes.h});
      call.batch_stride_dq_acc =
          sizes.is_group ? 0 : arrays.stride("dq_acc", {sizes.t, sizes.n, sizes.h});
      call.split_stride_dq_acc =
          splits == 1 ? 0 : arrays.stride("dq_acc", {batches, sizes.t, sizes.n, sizes.h});
      break;
    }
    case ATTN_AITER_ATOMIC_32: {
      Dims dims = sizes.per_row();
      dims.push_back(sizes.h);
      dq_acc = arrays.result("dq_acc", DataType::F32, dims);
      call.stride_dq_acc = arrays.stride("dq_acc", {sizes.h});
      call.nhead_stride_dq_acc = arrays.stride("dq_acc", {sizes.t, sizes.h});
      call.batch_stride_dq_acc =
          sizes.is_group ? 0 : arrays.stride("dq_acc", {sizes.n, sizes.t, sizes.h});
      break;
    }
    case ATTN_AITER_ATOMIC_16: {
      const int64_t rows = ceil_to(call.call.max_seq_len_q, 16);
      const int64_t dim = sizes.h == 192 ? 192 : 128;
      dq_acc = arrays.result("dq_acc", sizes.dtype, {sizes.batch, sizes.n, rows, dim});
      call.stride_dq_acc = arrays.stride("dq_acc", {dim});
      call.nhead_stride_dq_acc = arrays.stride("dq_acc", {rows, dim});
      call.batch_stride_dq_acc = arrays.stride("dq_acc", {sizes.n, rows, dim});
      break;
    }
  }
  call.dq_acc = dq_acc.data;
  call.dq_acc_bytes = static_cast<int64_t>(dq_acc.bytes);
}

}  // namespace

AttnAiterForward forward_struct(const CallSite& site, ArrayReader& arrays) {
  AttnAiterForward forward{};
  const Sizes sizes = read_call(site, arrays, forward.call);
  forward.logits_soft_cap = site.logits_soft_cap;
  forward.out = arrays.result("out", sizes.dtype, sizes.rows(sizes.t, sizes.n, sizes.v)).data;
  if (site.needs_lse) {
    forward.lse = static_cast<float*>(arrays.result("lse", DataType::F32, sizes.per_row()).data);
  }
  return forward;
}

BackwardCall backward_struct(const CallSite& site, ArrayReader& arrays) {
  BackwardCall backward;
  AttnAiterBackward& call = backward.call;
  const Sizes sizes = read_call(site, arrays, call.call);
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
    call.nhead_stride_dbias = arrays.stride("dbias", {sizes.s});
    call.stride_dbias = arrays.stride("dbias", {sizes.n, sizes.s});
    call.batch_stride_dbias = arrays.stride("dbias", {sizes.t, sizes.n, sizes.s});
  }
  call.softmax_d =
      static_cast<float*>(arrays.result("softmax_d", DataType::F32, sizes.per_row()).data);
  call.accumulator = site.accumulator;
  call.is_deterministic = site.deterministic;
  read_dq_acc(site, arrays, sizes, backward);

  call.stride_out_grad = call.call.stride_out;
  call.stride_dq = call.call.stride_q;
  call.stride_dk = arrays.stride("dk", {sizes.n, sizes.h});
  call.stride_dv = arrays.stride("dv", {sizes.n, sizes.v});
  call.nhead_stride_out_grad = call.call.nhead_stride_out;
  call.nhead_stride_dq = call.call.nhead_stride_q;
  call.nhead_stride_dk = arrays.stride("dk", {sizes.h});
  call.nhead_stride_dv = arrays.stride("dv", {sizes.v});
  if (sizes.is_group) return backward;
  call.batch_stride_out_grad = call.call.batch_stride_out;
  call.batch_stride_dq = call.call.batch_stride_q;
  call.batch_stride_dk = arrays.stride("dk", {sizes.s, sizes.n, sizes.h});
  call.batch_stride_dv = arrays.stride("dv", {sizes.s, sizes.n, sizes.v});
  return backward;
}

}  // namespace attn_dispatch
