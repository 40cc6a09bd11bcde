#include "calls.h"

#include <string_view>
#include <utility>

#include "extents.h"
#include "layout.h"
#include "mask.h"
#include "tangent.h"
#include "wide.h"
#include "wrong_value.h"

namespace attn_dispatch {
namespace {

constexpr size_t kForwardLists = 3, kBackwardLists = 7;
constexpr size_t kSinks = kForwardLists + kLists + 1;
constexpr size_t kForwardResults = 2, kGrads = 3;

int64_t rounded_up(int64_t length, int64_t tile) { return tiles_of(length, tile) * tile; }

int64_t entry_rows(const AttnFa4Set& set) {
  return int64_t{set.backward_tile_m} * set.backward_subtiles;
}

// The arrays of a variant, from the operand `first` on, to the last. The kernels clip every index.
Result<ModArrays> mod_arrays_of(const AttnFa4Set& set, const std::vector<Array>& operands,
                                size_t first) {
  const std::string_view types = set.variant_arrays;
  ATTN_RETURN_IF_ERROR(check_counts(operands, first + types.size(), "operands"));
  if (types.size() > kMostModArrays) {
    return wrong_value("arrays of a score_mod", "at most " + std::to_string(kMostModArrays),
                       types.size());
  }
  ModArrays found;
  for (const char type : types) {
    const Array& array = operands[first + found.count];
    const int64_t length = array.shape.empty() ? 0 : array.shape[0];
    ATTN_RETURN_IF_ERROR(check_extent("elements of a score_mod's array", length, kMostInt32));
    const ElementType expected = type == 'f' ? ElementType::kFloat32 : ElementType::kInt32;
    ATTN_RETURN_IF_ERROR(check_array(array, {"a score_mod's array", expected, {length}, kNumber}));
    found.arrays[found.count++] = {array.data, {static_cast<int32_t>(length)}};
  }
  return found;
}

Status check_sinks(const Array& array, const Extents& e) {
  const int64_t batch = shared_or(e.batch, array, 0);
  return check_array(array, {"sinks", ElementType::kFloat32, {batch, e.heads}, kNumber});
}

Status check_forward(const AttnFa4Set& set, CallKind kind, const std::vector<Array>& operands,
                     const std::vector<Array>& results, const Extents& e) {
  const ElementType type = type_of(set);
  const Shapes shapes = shapes_of(e, set);
  ATTN_RETURN_IF_ERROR(check_all(operands, 0,
                                 {{"query", type, shapes.query, kVector},
                                  {"key", type, shapes.key, kVector},
                                  {"value", type, shapes.value, kVector}}));
  ATTN_RETURN_IF_ERROR(check_mask(operands, kForwardLists, kind.mask,
                                  tiles_of(e.rows, set.forward_tile_m),
                                  tiles_of(e.keys, set.forward_tile_n), e));
  if (kind.has_sinks) ATTN_RETURN_IF_ERROR(check_sinks(operands[kSinks], e));
  return check_all(
      results, 0,
      {{"out", type, shapes.out, kVector}, {"lse", ElementType::kFloat32, shapes.lse, kNumber}});
}

// The scratch arrays, in the order of the results.
std::vector<Expected> scratch_of(const AttnFa4Set& set, const Extents& e) {
  const int64_t rows = rounded_up(e.rows, set.backward_tile_m);
  const int64_t keys = rounded_up(e.keys, set.backward_tile_n);
  const ElementType type = ElementType::kFloat32;
  std::vector<Expected> all = {
      {"products", type, {e.batch, e.heads, rows}, kVector},
      {"lse2", type, {e.batch, e.heads, rows}, kVector},
      {"query_sums", type, {e.batch, e.heads, rows * set.head_dim}, kVector}};
  if (e.is_grouped()) {
    all.push_back({"key_sums", type, {e.batch, e.kv_heads, keys * set.head_dim}, kVector});
    all.push_back({"value_sums", type, {e.batch, e.kv_heads, keys * set.head_dim_v}, kVector});
  }
  return all;
}

Status check_backward(const AttnFa4Set& set, MaskForm form, const std::vector<Array>& operands,
                      const std::vector<Array>& results, const Extents& e) {
  const ElementType type = type_of(set), number = ElementType::kFloat32;
  const Shapes shapes = shapes_of(e, set);
  ATTN_RETURN_IF_ERROR(check_all(operands, 0,
                                 {{"query", type, shapes.query, kVector},
                                  {"key", type, shapes.key, kVector},
                                  {"value", type, shapes.value, kVector},
                                  {"out", type, shapes.out, kVector},
                                  {"lse", number, shapes.lse, kNumber},
                                  {"out_grad", type, shapes.out, kVector},
                                  {"lse_grad", number, shapes.lse, kNumber}}));
  ATTN_RETURN_IF_ERROR(check_mask(operands, kBackwardLists, form,
                                  tiles_of(e.keys, set.backward_tile_n),
                                  tiles_of(e.rows, entry_rows(set)), e));
  ATTN_RETURN_IF_ERROR(check_all(results, 0,
                                 {{"query's gradient", type, shapes.query, kVector},
                                  {"key's gradient", type, shapes.key, kVector},
                                  {"value's gradient", type, shapes.value, kVector}}));
  const std::vector<Expected> scratch = scratch_of(set, e);
  ATTN_RETURN_IF_ERROR(check_counts(results, kGrads + scratch.size(), "results"));
  for (const Expected& array : scratch) {
    ATTN_RETURN_IF_ERROR(check_extent(array.name, array.shape.back(), kMostInt32));
  }
  return check_all(results, kGrads, scratch);
}

Status fill_all(const std::vector<Array>& arrays, cudaStream_t stream) {
  for (const Array& array : arrays) {
    ATTN_RETURN_IF_ERROR(fill(array.data, 0xff, array.bytes, stream));
  }
  return {};
}

// Query rows and keys of a tile, as the lists of a pass count them.
std::pair<int64_t, int64_t> tiles_of_lists(const AttnFa4Set& set, Pass pass) {
  if (pass == Pass::kForward) return {set.forward_tile_m, set.forward_tile_n};
  if (pass == Pass::kBackward) return {entry_rows(set), set.backward_tile_n};
  return {set.tangent_tile_m, set.tangent_tile_n};
}

}  // namespace

Result<CompiledSet*> find_set(const Fa4Spec& spec, Pass pass) {
  const CompiledLibrary* library = compiled_library();
  if (!library) {
    return Status{Code::kLibrary,
                  "its kernels are not loaded; build them with `attn-dispatch build-fa4`"};
  }
  CompiledSet* set = library->find(spec.set);
  if (!set) {
    return Status{Code::kLibrary, library->path + " has no kernels " + to_text(spec.set) +
                                      "; build them with `attn-dispatch build-fa4`"};
  }
  if (pass == Pass::kWideForward || pass == Pass::kWideBackward) return set;
  const auto [tile_m, tile_n] = tiles_of_lists(set->facts, pass);
  if (spec.tile_m != tile_m || spec.tile_n != tile_n) {
    const auto tiles = [](int64_t m, int64_t n) {
      return std::to_string(m) + " x " + std::to_string(n);
    };
    return Status{Code::kLibrary, "the program was lowered for tiles of " +
                                      tiles(spec.tile_m, spec.tile_n) + ", and the kernels " +
                                      spec.set + " have tiles of " + tiles(tile_m, tile_n) +
                                      "; lower it again here"};
  }
  return set;
}

Status load_pass(CompiledSet& set, CallKind kind, Pass pass, int32_t ordinal) {
  if (pass == Pass::kTangent) return load_tangent(set, kind, ordinal);
  if (pass == Pass::kWideForward || pass == Pass::kWideBackward) {
    return load_wide(set, kind, pass, ordinal);
  }
  const bool is_backward = pass == Pass::kBackward;
  MaskedKernels& masked = set.masked(kind.mask);
  if (!masked.forward.exists()) {
    return {Code::kUnsupported, std::string("the kernels ") + set.facts.name + " take no mask"};
  }
  if (!is_backward && !kind.has_sinks) return masked.forward.load(ordinal);
  if (!is_backward) {
    if (set.takes_sinks()) return masked.forward_sinks.load(ordinal);
    return {Code::kUnsupported, std::string("the kernels ") + set.facts.name + " take no sinks"};
  }
  for (CompiledKernel* kernel : {&set.preprocess, &masked.backward, &set.query_grad,
                                 &masked.backward_grouped, &set.key_value_grad}) {
    if (kernel->exists()) ATTN_RETURN_IF_ERROR(kernel->load(ordinal));
  }
  return {};
}

Status run_forward(const CompiledSet& set, CallKind kind, float scale,
                   const std::vector<Array>& operands, const std::vector<Array>& results,
                   bool poisons, cudaStream_t stream) {
  const Result<ModArrays> mod = mod_arrays_of(set.facts, operands, kSinks + kind.has_sinks);
  if (!mod.ok()) return mod.status;
  ATTN_RETURN_IF_ERROR(check_counts(results, kForwardResults, "results"));
  const Result<Extents> extents = extents_of(operands);
  if (!extents.ok()) return extents.status;
  ATTN_RETURN_IF_ERROR(check_forward(set.facts, kind, operands, results, extents.value));
  if (poisons) ATTN_RETURN_IF_ERROR(fill_all(results, stream));
  const Mask mask = mask_of(operands, kForwardLists, kind.mask, extents.value);
  const auto launch = [&](const CompiledKernel& kernel, auto... further) {
    return kernel.with_mod(mod.value, stream, scale, as_heads(operands[kQuery]),
                           as_heads(operands[kKey]), as_heads(operands[kValue]),
                           as_heads(results[0]), as_numbers(results[1]), mask.partial_counts,
                           mask.partial_indices, mask.full_counts, mask.full_indices, mask.data,
                           further...);
  };
  const MaskedKernels& masked = set.masked(kind.mask);
  if (!kind.has_sinks) return launch(masked.forward);
  const auto batch = static_cast<int32_t>(extents.value.batch);
  return launch(masked.forward_sinks, as_sinks(operands[kSinks], batch));
}

Status run_backward(const CompiledSet& set, CallKind kind, float scale,
                    const std::vector<Array>& operands, const std::vector<Array>& results,
                    bool poisons, cudaStream_t stream) {
  const Result<ModArrays> mod = mod_arrays_of(set.facts, operands, kBackwardLists + kLists + 1);
  if (!mod.ok()) return mod.status;
  if (results.size() < kGrads) return check_counts(results, kGrads, "results");
  const Result<Extents> extents = extents_of(operands);
  if (!extents.ok()) return extents.status;
  const bool is_grouped = extents.value.is_grouped();
  const MaskedKernels& masked = set.masked(kind.mask);
  if (is_grouped && !masked.backward_grouped.exists()) {
    return {Code::kUnsupported, std::string("the kernels ") + set.facts.name +
                                    " have no backward pass of grouped heads"};
  }
  ATTN_RETURN_IF_ERROR(check_backward(set.facts, kind.mask, operands, results, extents.value));
  if (poisons) ATTN_RETURN_IF_ERROR(fill_all(results, stream));

  const Mask mask = mask_of(operands, kBackwardLists, kind.mask, extents.value);
  const AttnFa4Heads out_grad = as_heads(operands[5]);
  const AttnFa4Numbers products = as_numbers(results[kGrads]);
  const AttnFa4Numbers lse2 = as_numbers(results[kGrads + 1]);
  const AttnFa4Numbers query_sums = as_numbers(results[kGrads + 2]);
  const AttnFa4Heads dq = as_heads(results[0]), dk = as_heads(results[1]);
  const AttnFa4Heads dv = as_heads(results[2]);

  const auto differentiate = [&](const CompiledKernel& kernel, auto key_grad, auto value_grad) {
    return kernel.with_mod(mod.value, stream, scale, as_heads(operands[kQuery]),
                           as_heads(operands[kKey]), as_heads(operands[kValue]), out_grad, lse2,
                           products, query_sums, key_grad, value_grad, mask.partial_counts,
                           mask.partial_indices, mask.full_counts, mask.full_indices, mask.data);
  };
  // Before the kernels: each lets the next begin early, and a memset between them would not wait.
  for (size_t i = kGrads + 3; i < results.size(); ++i) {
    ATTN_RETURN_IF_ERROR(fill(results[i].data, 0, results[i].bytes, stream));
  }
  ATTN_RETURN_IF_ERROR(set.preprocess(stream, scale, as_heads(operands[3]), out_grad, products,
                                      as_numbers(operands[4]), lse2, query_sums,
                                      as_numbers(operands[6])));
  if (!is_grouped) {
    ATTN_RETURN_IF_ERROR(differentiate(masked.backward, dk, dv));
    return set.query_grad(stream, scale, query_sums, dq);
  }
  const AttnFa4Numbers key_sums = as_numbers(results[kGrads + 3]);
  const AttnFa4Numbers value_sums = as_numbers(results[kGrads + 4]);
  ATTN_RETURN_IF_ERROR(differentiate(masked.backward_grouped, key_sums, value_sums));
  ATTN_RETURN_IF_ERROR(set.query_grad(stream, scale, query_sums, dq));
  ATTN_RETURN_IF_ERROR(set.key_value_grad(stream, scale, key_sums, dk));
  return set.key_value_grad(stream, 1.0f, value_sums, dv);
}

}  // namespace attn_dispatch
