// The split-KV call. Queries come with their heads first, [batch, heads, rows, head dim]: rows are
// those of a workgroup's tile, in which the front end puts the query heads of a kv head where it
// can. Keys and values are [pages or batch, keys, kv heads, head dim], or with heads before keys;
// of a pool of both the same array is given twice, and values begin some pages after keys. Scratch
// is [batch, heads, splits, rows, ...], so that what one workgroup combines lies together: CK
// counts from split to split in 32 bits.
#include "fill.h"
#include "narrow.h"

namespace attn_dispatch {
namespace {

using xla::ffi::DataType;

struct Sizes {
  int64_t batch = 0, n = 0, t = 0, h = 0;       // of the queries
  int64_t blocks = 0, block = 0, k = 0, v = 0;  // pages and keys in them; or rows and their keys
  DataType dtype = DataType::INVALID;
};

Sizes take_qkv(Arrays& arrays, const CallSite& site, AttnAiterCall& call) {
  Sizes sizes;
  const Array q = arrays.operand("q"), k = arrays.operand("k"), v = arrays.operand("v");
  if (q.dims.size() != 4 || k.dims.size() != 4 || v.dims.size() != 4) {
    arrays.fail("q, k and v: expected 4 axes each");
    return sizes;
  }
  if (q.dtype != DataType::F16 && q.dtype != DataType::BF16) {
    arrays.fail("q: expected float16 or bfloat16");
  }
  sizes.dtype = q.dtype;
  sizes.batch = q.dims[0];
  sizes.n = q.dims[1];
  sizes.t = q.dims[2];
  sizes.h = q.dims[3];
  sizes.blocks = k.dims[0];
  sizes.block = k.dims[site.heads_first_kv ? 2 : 1];
  sizes.k = k.dims[site.heads_first_kv ? 1 : 2];
  sizes.v = v.dims[3];
  if (k.dims[3] != sizes.h || v.dims != Dims{k.dims[0], k.dims[1], k.dims[2], sizes.v} ||
      k.dtype != q.dtype || v.dtype != q.dtype || sizes.k == 0 || sizes.n % sizes.k != 0 ||
      (!site.is_paged && sizes.blocks != sizes.batch)) {
    arrays.fail(
        "k and v: expected q's dtype and head dim, q's batch or pages, equal lengths and heads, "
        "and a number of heads that divides q's");
  }
  call.q = q.data;
  call.k = k.data;
  // Every page of keys has one of values behind it.
  const int64_t values_before = site.value_page * sizes.block * sizes.k * sizes.v;
  call.v = static_cast<char*>(v.data) + 2 * values_before;
  if (sizes.blocks < site.value_page) arrays.fail("k and v: expected as many pages as value_page");
  sizes.blocks -= site.value_page;
  return sizes;
}

}  // namespace

AttnAiterSplitKv fill_split_kv(const CallSite& site, Arrays& arrays) {
  const Narrow narrow(arrays);
  AttnAiterSplitKv split{};
  AttnAiterCall& call = split.call;
  call = site.call;
  const Sizes sizes = take_qkv(arrays, site, call);
  const int64_t batch = sizes.batch, n = sizes.n, t = sizes.t, v = sizes.v;
  const int64_t splits = site.num_splits;
  if (call.bias_kind == ATTN_AITER_ALIBI) {
    const Array slopes = arrays.operand("bias");
    if (slopes.dtype != DataType::F32 || slopes.dims.size() != 2 || slopes.dims[1] != n ||
        (slopes.dims[0] != 1 && slopes.dims[0] != batch)) {
      arrays.fail("ALiBi slopes: expected float32 [1 or batch, heads]");
      return split;
    }
    call.bias = slopes.data;
    call.stride_bias = slopes.dims[0] == 1 ? 0 : narrow(n);
  } else if (call.bias_kind != ATTN_AITER_NO_BIAS) {
    arrays.fail("bias: the split-KV call takes none but ALiBi slopes");
  }
  call.seqlen_k =
      static_cast<const int32_t*>(arrays.operand("seqlen_k", DataType::S32, {batch}).data);
  int64_t keys = sizes.block;
  if (site.is_paged) {
    const Array table = arrays.operand("page_table");
    if (table.dtype != DataType::S32 || table.dims.size() != 2 || table.dims[0] != batch) {
      arrays.fail("page_table: expected int32 [batch, pages of a row]");
      return split;
    }
    split.page_table = static_cast<const int32_t*>(table.data);
    split.batch_stride_page_table = narrow(table.dims[1]);
    split.page_size = narrow(sizes.block);
    split.num_pages = narrow(sizes.blocks);
    keys = sizes.block * table.dims[1];
  }
  if (call.max_seq_len_q != t || call.max_seq_len_kv != keys) {
    arrays.fail("max_seq_len_q and max_seq_len_kv: expected the rows of q and the keys of a row");
  }

  split.logits_soft_cap = site.logits_soft_cap;
  split.num_splits = site.num_splits;
  split.out = arrays.result("out", sizes.dtype, {batch, n, t, v}).data;
  if (site.needs_lse) {
    split.lse = static_cast<float*>(arrays.result("lse", DataType::F32, {batch, n, t}).data);
  }
  split.lse_acc =
      static_cast<float*>(arrays.result("lse_acc", DataType::F32, {batch, n, splits, t}).data);
  split.out_acc =
      static_cast<float*>(arrays.result("out_acc", DataType::F32, {batch, n, splits, t, v}).data);

  call.dtype = sizes.dtype == DataType::F16 ? ATTN_AITER_FP16 : ATTN_AITER_BF16;
  call.batch = narrow(batch);
  call.seq_len_q = narrow(t);
  call.seq_len_kv = narrow(keys);
  call.num_heads = narrow(n);
  call.num_kv_heads = narrow(sizes.k);
  call.head_dim = narrow(sizes.h);
  call.head_dim_v = narrow(v);

  call.stride_q = narrow(sizes.h);
  call.stride_k = narrow(site.heads_first_kv ? sizes.h : sizes.k * sizes.h);
  call.stride_v = narrow(site.heads_first_kv ? v : sizes.k * v);
  call.stride_out = narrow(v);
  call.nhead_stride_q = narrow(t * sizes.h);
  call.nhead_stride_k = narrow(site.heads_first_kv ? sizes.block * sizes.h : sizes.h);
  call.nhead_stride_v = narrow(site.heads_first_kv ? sizes.block * v : v);
  call.nhead_stride_out = narrow(t * v);
  call.nhead_stride_lse = narrow(t);
  call.batch_stride_q = narrow(n * t * sizes.h);
  call.batch_stride_k = narrow(sizes.block * sizes.k * sizes.h);
  call.batch_stride_v = narrow(sizes.block * sizes.k * v);
  call.batch_stride_out = narrow(n * t * v);
  call.batch_stride_lse = narrow(n * t);

  split.stride_out_acc = narrow(v);
  split.split_stride_lse_acc = narrow(t);
  split.split_stride_out_acc = narrow(t * v);
  split.nhead_stride_lse_acc = narrow(splits * t);
  split.nhead_stride_out_acc = narrow(splits * t * v);
  split.batch_stride_lse_acc = narrow(n * splits * t);
  split.batch_stride_out_acc = narrow(n * splits * t * v);
  return split;
}

}  // namespace attn_dispatch
