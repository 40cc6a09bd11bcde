#include "tangent.h"

#include "extents.h"
#include "layout.h"
#include "mask.h"
#include "wrong_value.h"

namespace attn_dispatch {
namespace {

constexpr size_t kMaskStart = 8, kResults = 2;

Status has_none(const AttnFa4Set& set) {
  return {Code::kUnsupported, std::string("the kernels ") + set.name + " compute no tangents"};
}

Status check_tangent(const AttnFa4Set& set, CallKind kind, const std::vector<Array>& operands,
                     const std::vector<Array>& results, const Extents& e) {
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
  ATTN_RETURN_IF_ERROR(check_mask(operands, kMaskStart, kind.mask,
                                  tiles_of(e.rows, set.tangent_tile_m),
                                  tiles_of(e.keys, set.tangent_tile_n), e));
  return check_all(results, 0,
                   {{"out's tangent", type, shapes.out, kVector},
                    {"lse's tangent", number, shapes.lse, kNumber}});
}

}  // namespace

Status load_tangent(CompiledSet& set, CallKind kind, int32_t ordinal) {
  CompiledKernel& kernel = set.masked(kind.mask).tangent;
  return kernel.exists() ? kernel.load(ordinal) : has_none(set.facts);
}

Status run_tangent(const CompiledSet& set, CallKind kind, float scale,
                   const std::vector<Array>& operands, const std::vector<Array>& results,
                   bool poisons, cudaStream_t stream) {
  const CompiledKernel& kernel = set.masked(kind.mask).tangent;
  if (!kernel.exists()) return has_none(set.facts);
  ATTN_RETURN_IF_ERROR(check_counts(operands, kMaskStart + kLists + 1, "operands"));
  ATTN_RETURN_IF_ERROR(check_counts(results, kResults, "results"));
  const Result<Extents> extents = extents_of(operands);
  if (!extents.ok()) return extents.status;
  ATTN_RETURN_IF_ERROR(check_tangent(set.facts, kind, operands, results, extents.value));
  if (poisons) {
    for (const Array& array : results) {
      ATTN_RETURN_IF_ERROR(fill(array.data, 0xff, array.bytes, stream));
    }
  }
  const Mask mask = mask_of(operands, kMaskStart, kind.mask, extents.value);
  const auto heads = [&](size_t i) { return as_heads(operands[i]); };
  return kernel(stream, scale, heads(0), heads(1), heads(2), heads(3), heads(4), heads(5), heads(6),
                as_numbers(operands[7]), as_heads(results[0]), as_numbers(results[1]),
                mask.partial_counts, mask.partial_indices, mask.full_counts, mask.full_indices,
                mask.data);
}

}  // namespace attn_dispatch
