#include "tangent.h"

#include "extents.h"
#include "layout.h"
#include "wrong_value.h"

namespace attn_dispatch {
namespace {

constexpr size_t kOperands = 8, kResults = 2;

Status has_none(const AttnFa4Set& set) {
  return {Code::kUnsupported, std::string("the kernels ") + set.name + " compute no tangents"};
}

Status check_tangent(const AttnFa4Set& set, CallKind kind, const std::vector<Array>& operands,
                     const std::vector<Array>& results) {
  ATTN_RETURN_IF_ERROR(check_counts(operands, kOperands, "operands"));
  ATTN_RETURN_IF_ERROR(check_counts(results, kResults, "results"));
  const Result<Extents> extents = extents_of(operands);
  if (!extents.ok()) return extents.status;
  const Extents& e = extents.value;
  if (kind.is_causal && e.rows != e.keys) {
    return wrong_value("keys of a causal tangent", std::to_string(e.rows) + ", as query rows",
                       e.keys);
  }
  const ElementType type = type_of(set), number = ElementType::kFloat32;
  const Shapes shapes = shapes_of(e, set);
  ATTN_RETURN_IF_ERROR(check_all(operands, 0,
                                 {{"query", type, shapes.query, kVector},
                                  {"key", type, shapes.key, kVector},
                                  {"value", type, shapes.value, kVector},
                                  {"query's tangent", type, shapes.query, kVector},
                                  {"key's tangent", type, shapes.key, kVector},
                                  {"value's tangent", type, shapes.value, kVector},
                                  {"out", type, shapes.out, kVector},
                                  {"lse", number, shapes.lse, kNumber}}));
  return check_all(results, 0,
                   {{"out's tangent", type, shapes.out, kVector},
                    {"lse's tangent", number, shapes.lse, kNumber}});
}

}  // namespace

Status load_tangent(CompiledSet& set, CallKind kind, int32_t ordinal) {
  CompiledKernel& kernel = kind.is_causal ? set.tangent_causal : set.tangent;
  return kernel.exists() ? kernel.load(ordinal) : has_none(set.facts);
}

Status run_tangent(const CompiledSet& set, CallKind kind, float scale,
                   const std::vector<Array>& operands, const std::vector<Array>& results,
                   bool poisons, cudaStream_t stream) {
  const CompiledKernel& kernel = kind.is_causal ? set.tangent_causal : set.tangent;
  if (!kernel.exists()) return has_none(set.facts);
  ATTN_RETURN_IF_ERROR(check_tangent(set.facts, kind, operands, results));
  if (poisons) {
    for (const Array& array : results) {
      ATTN_RETURN_IF_ERROR(fill(array.data, 0xff, array.bytes, stream));
    }
  }
  const auto heads = [&](size_t i) { return as_heads(operands[i]); };
  return kernel(stream, scale, heads(0), heads(1), heads(2), heads(3), heads(4), heads(5), heads(6),
                as_numbers(operands[7]), as_heads(results[0]), as_numbers(results[1]));
}

}  // namespace attn_dispatch
