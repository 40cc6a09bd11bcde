// The struct of a split-KV call. Queries are [batch, heads, rows, head dim]; the rows are those of
// a workgroup's tile, into which Python puts the query heads of one kv head where it can. Keys and
// values are [pages or batch, keys, kv heads, head dim], or with heads before keys. Where one pool
// holds both, the same array is passed twice, and values begin `value_page` pages after keys.
// Scratch is [batch, heads, splits, rows, ...], so that what one workgroup combines is contiguous:
// CK counts from split to split in 32 bits.
#include "call_structs.h"

namespace attn_dispatch {
namespace {

using xla::ffi::DataType;

struct Sizes {
  int64_t batch = 0, n = 0, t = 0, h = 0;       // of the queries
  int64_t blocks = 0, block = 0, k = 0, v = 0;  // pages and keys per page; or rows and keys per row
  DataType dtype = DataType::INVALID;
};

Sizes read_qkv(ArrayReader& arrays, const CallSite& site, AttnAiterCall& call) {
  Sizes sizes;
  const Array q = arrays.operand("q"), k = arrays.operand("k"), v = arrays.operand("v");
  if ((q.dtype != DataType::F16 && q.dtype != DataType::BF16) || q.dims.size() != 4) {
    arrays.fail("q", "float16 or bfloat16 of 4 axes", describe(q));
    return sizes;
  }
  sizes.dtype = q.dtype;
  sizes.batch = q.dims[0];
  sizes.n = q.dims[1];
  sizes.t = q.dims[2];
  sizes.h = q.dims[3];
  if (k.dtype != q.dtype || k.dims.size() != 4 || k.dims[3] != sizes.h ||
      (!site.is_paged && k.dims[0] != sizes.batch)) {
    arrays.fail("k", "q's dtype and head dim, and its batch or pages, with " + describe(q),
                describe(k));
    return sizes;
  }
  if (v.dims.size() == 4) sizes.v = v.dims[3];
  if (v.dtype != q.dtype || v.dims != Dims{k.dims[0], k.dims[1], k.dims[2], sizes.v}) {
    arrays.fail("v", "k's dtype and shape but for the head dim, with " + describe(k), describe(v));
    return sizes;
  }
  sizes.block = k.dims[site.heads_first_kv ? 2 : 1];
  sizes.k = k.dims[site.heads_first_kv ? 1 : 2];
  // Every page of keys needs a page of values behind it.
  if (site.value_page >= k.dims[0]) {
    arrays.fail("value_page", "fewer than k's " + std::to_string(k.dims[0]) + " pages",
                std::to_string(site.value_page));
    return sizes;
  }
  sizes.blocks = k.dims[0] - site.value_page;
  call.q = q.data;
  call.k = k.data;
  call.v = static_cast<char*>(v.data) +
           arrays.product("v", {2, site.value_page, sizes.block, sizes.k, sizes.v});
  return sizes;
}

}  // namespace

AttnAiterSplitKv split_kv_struct(const CallSite& site, ArrayReader& arrays) {
  AttnAiterSplitKv split{};
  AttnAiterCall& call = split.call;
  call = site.call;
  const Sizes sizes = read_qkv(arrays, site, call);
  const int64_t batch = sizes.batch, n = sizes.n, t = sizes.t, v = sizes.v;
  const int64_t splits = site.num_splits;
  if (call.bias_kind == ATTN_AITER_ALIBI) {
    const Array slopes = arrays.operand("bias");
    const bool is_shared = !slopes.dims.empty() && slopes.dims[0] == 1;
    if (slopes.dtype != DataType::F32 || slopes.dims != Dims{is_shared ? 1 : batch, n}) {
      arrays.fail("bias",
                  describe(DataType::F32, {batch, n}) +
                      " of ALiBi slopes, of which the first "
                      "axis may be 1",
                  describe(slopes));
      return split;
    }
    call.bias = slopes.data;
    call.stride_bias = is_shared ? 0 : arrays.stride("bias", {n});
  }
  call.seqlen_k =
      static_cast<const int32_t*>(arrays.operand("seqlen_k", DataType::S32, {batch}).data);
  int64_t keys = sizes.block;
  if (site.is_paged) {
    const Array table = arrays.operand("page_table");
    if (table.dtype != DataType::S32 || table.dims.size() != 2 || table.dims[0] != batch) {
      arrays.fail("page_table", "int32 of two axes, the first of " + std::to_string(batch),
                  describe(table));
      return split;
    }
    split.page_table = static_cast<const int32_t*>(table.data);
    split.batch_stride_page_table = arrays.stride("page_table", {table.dims[1]});
    split.page_size = static_cast<int32_t>(sizes.block);
    split.num_pages = static_cast<int32_t>(sizes.blocks);
    keys = arrays.stride("page_table", {sizes.block, table.dims[1]});
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
  call.batch = static_cast<int32_t>(batch);  // every axis fits in an int32
  call.seq_len_q = static_cast<int32_t>(t);
  call.seq_len_kv = static_cast<int32_t>(keys);
  call.num_heads = static_cast<int32_t>(n);
  call.num_kv_heads = static_cast<int32_t>(sizes.k);
  call.head_dim = static_cast<int32_t>(sizes.h);
  call.head_dim_v = static_cast<int32_t>(v);

  const int64_t kv_heads_between = site.heads_first_kv ? 1 : sizes.k;
  const int64_t keys_between = site.heads_first_kv ? sizes.block : 1;
  call.stride_q = arrays.stride("q", {sizes.h});
  call.stride_k = arrays.stride("k", {kv_heads_between, sizes.h});
  call.stride_v = arrays.stride("v", {kv_heads_between, v});
  call.stride_out = arrays.stride("out", {v});
  call.nhead_stride_q = arrays.stride("q", {t, sizes.h});
  call.nhead_stride_k = arrays.stride("k", {keys_between, sizes.h});
  call.nhead_stride_v = arrays.stride("v", {keys_between, v});
  call.nhead_stride_out = arrays.stride("out", {t, v});
  call.nhead_stride_lse = arrays.stride("lse", {t});
  call.batch_stride_q = arrays.stride("q", {n, t, sizes.h});
  call.batch_stride_k = arrays.stride("k", {sizes.block, sizes.k, sizes.h});
  call.batch_stride_v = arrays.stride("v", {sizes.block, sizes.k, v});
  call.batch_stride_out = arrays.stride("out", {n, t, v});
  call.batch_stride_lse = arrays.stride("lse", {n, t});

  split.stride_out_acc = arrays.stride("out_acc", {v});
  split.split_stride_lse_acc = arrays.stride("lse_acc", {t});
  split.split_stride_out_acc = arrays.stride("out_acc", {t, v});
  split.nhead_stride_lse_acc = arrays.stride("lse_acc", {splits, t});
  split.nhead_stride_out_acc = arrays.stride("out_acc", {splits, t, v});
  split.batch_stride_lse_acc = arrays.stride("lse_acc", {n, splits, t});
  split.batch_stride_out_acc = arrays.stride("out_acc", {n, splits, t, v});
  return split;
}

}  // namespace attn_dispatch
