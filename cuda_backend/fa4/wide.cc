#include "wide.h"

#include <algorithm>

#include "extents.h"
#include "layout.h"
#include "wrong_value.h"

namespace attn_dispatch {
namespace {

constexpr int64_t kColumns = 8;  // TMA's strides are multiples of 16 bytes
constexpr size_t kOperands[] = {3, 6}, kResults[] = {2, 3};

Status has_none(const AttnFa4Set& set) {
  return {Code::kUnsupported,
          std::string("the kernels ") + set.name + " run no calls without a mask"};
}

// A call, and what the kernels see of it.
struct WideCall {
  Extents extents;
  int64_t columns, keys, seen_rows;

  int64_t unseen_rows() const { return extents.rows - seen_rows; }
  Shape query() const { return {extents.batch, extents.rows, extents.heads, columns}; }
  Shape key() const { return {extents.batch, extents.keys, extents.kv_heads, columns}; }
};

Result<WideCall> call_of(const AttnFa4Set& set, CallKind kind, const std::vector<Array>& operands,
                         const std::vector<Array>& results, bool is_backward) {
  ATTN_RETURN_IF_ERROR(check_counts(operands, kOperands[is_backward], "operands"));
  ATTN_RETURN_IF_ERROR(check_counts(results, kResults[is_backward], "results"));
  const Result<Extents> extents = extents_of(operands);
  if (!extents.ok()) return extents.status;
  const Extents& e = extents.value;
  const int64_t columns = operands[kQuery].shape[3];
  ATTN_RETURN_IF_ERROR(check_extent("head dim", columns, set.head_dim));
  if (columns % kColumns != 0) {
    return wrong_value("head dim", "a multiple of " + std::to_string(kColumns), columns);
  }
  ATTN_RETURN_IF_ERROR(check_extent("keys that queries see", kind.keys, e.keys));
  const int64_t seen_rows = kind.is_causal ? std::min(e.rows, kind.keys) : e.rows;
  return WideCall{e, columns, kind.keys, seen_rows};
}

Status check_forward(const AttnFa4Set& set, const WideCall& call,
                     const std::vector<Array>& operands, const std::vector<Array>& results) {
  const ElementType type = type_of(set);
  const Shape lse = {call.extents.batch, call.extents.heads, call.seen_rows};
  ATTN_RETURN_IF_ERROR(check_all(operands, 0,
                                 {{"query", type, call.query(), kVector},
                                  {"key", type, call.key(), kVector},
                                  {"value", type, call.key(), kVector}}));
  return check_all(
      results, 0,
      {{"out", type, call.query(), kVector}, {"lse", ElementType::kFloat32, lse, kNumber}});
}

Status check_backward(const AttnFa4Set& set, const WideCall& call,
                      const std::vector<Array>& operands, const std::vector<Array>& results) {
  const ElementType type = type_of(set), number = ElementType::kFloat32;
  const int64_t tile = set.backward_tile_m;
  const Shape rows = {call.extents.batch, call.extents.heads,
                      (call.seen_rows + tile - 1) / tile * tile};
  ATTN_RETURN_IF_ERROR(check_all(operands, 0,
                                 {{"query", type, call.query(), kVector},
                                  {"key", type, call.key(), kVector},
                                  {"value", type, call.key(), kVector},
                                  {"out_grad", type, call.query(), kVector},
                                  {"lse2", number, rows, kVector},
                                  {"products", number, rows, kVector}}));
  return check_all(results, 0,
                   {{"query's gradient", type, call.query(), kVector},
                    {"key's gradient", type, call.key(), kVector},
                    {"value's gradient", type, call.key(), kVector}});
}

// Rows of heads from `first` on, as many as `rows`.
AttnFa4Wide as_wide(const Array& array, int64_t first, int64_t rows) {
  constexpr int64_t kBytes = 2;
  return {static_cast<char*>(array.data) + first * stride(array, 1) * kBytes,
          {extent(array, 0), static_cast<int32_t>(rows), extent(array, 2), extent(array, 3)},
          {stride(array, 0), stride(array, 1), stride(array, 2)}};
}

AttnFa4Wide queries(const Array& array, const WideCall& call) {
  return as_wide(array, call.unseen_rows(), call.seen_rows);
}

AttnFa4Wide keys(const Array& array, const WideCall& call) { return as_wide(array, 0, call.keys); }

Status fill_all(const std::vector<Array>& arrays, int value, cudaStream_t stream) {
  for (const Array& array : arrays) {
    ATTN_RETURN_IF_ERROR(fill(array.data, value, array.bytes, stream));
  }
  return {};
}

}  // namespace

Status load_wide(CompiledSet& set, CallKind kind, Pass pass, int32_t ordinal) {
  WideKernels& kernels = set.wide(kind.is_causal);
  if (!kernels.forward.exists()) return has_none(set.facts);
  if (pass == Pass::kWideForward) return kernels.forward.load(ordinal);
  ATTN_RETURN_IF_ERROR(kernels.key_grads.load(ordinal));
  return kernels.query_grad.load(ordinal);
}

Status run_wide_forward(const CompiledSet& set, CallKind kind, float scale,
                        const std::vector<Array>& operands, const std::vector<Array>& results,
                        bool poisons, cudaStream_t stream) {
  const WideKernels& kernels = set.wide(kind.is_causal);
  if (!kernels.forward.exists()) return has_none(set.facts);
  const Result<WideCall> found = call_of(set.facts, kind, operands, results, false);
  if (!found.ok()) return found.status;
  const WideCall& call = found.value;
  ATTN_RETURN_IF_ERROR(check_forward(set.facts, call, operands, results));
  if (poisons) ATTN_RETURN_IF_ERROR(fill_all(results, 0xff, stream));
  if (call.unseen_rows() > 0) ATTN_RETURN_IF_ERROR(fill_all({results[0]}, 0, stream));
  return kernels.forward(stream, scale, queries(operands[kQuery], call), keys(operands[kKey], call),
                         keys(operands[kValue], call), queries(results[0], call),
                         as_numbers(results[1]));
}

Status run_wide_backward(const CompiledSet& set, CallKind kind, float scale,
                         const std::vector<Array>& operands, const std::vector<Array>& results,
                         bool poisons, cudaStream_t stream) {
  const WideKernels& kernels = set.wide(kind.is_causal);
  if (!kernels.forward.exists()) return has_none(set.facts);
  const Result<WideCall> found = call_of(set.facts, kind, operands, results, true);
  if (!found.ok()) return found.status;
  const WideCall& call = found.value;
  ATTN_RETURN_IF_ERROR(check_backward(set.facts, call, operands, results));
  if (poisons) ATTN_RETURN_IF_ERROR(fill_all(results, 0xff, stream));
  if (call.unseen_rows() > 0) ATTN_RETURN_IF_ERROR(fill_all({results[0]}, 0, stream));
  if (call.keys < call.extents.keys) {
    ATTN_RETURN_IF_ERROR(fill_all({results[1], results[2]}, 0, stream));
  }
  const AttnFa4Wide query = queries(operands[kQuery], call), out_grad = queries(operands[3], call);
  const AttnFa4Wide key = keys(operands[kKey], call), value = keys(operands[kValue], call);
  const AttnFa4Numbers lse2 = as_numbers(operands[4]), products = as_numbers(operands[5]);
  ATTN_RETURN_IF_ERROR(kernels.key_grads(stream, scale, query, key, value, out_grad, lse2, products,
                                         keys(results[1], call), keys(results[2], call)));
  return kernels.query_grad(stream, scale, query, key, value, out_grad, lse2, products,
                            queries(results[0], call));
}

}  // namespace attn_dispatch
