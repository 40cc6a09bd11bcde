#include "validate.h"

#include <algorithm>
#include <cmath>

#include "buffers.h"
#include "engine.h"
#include "score_program.h"
#include "wrong_value.h"

namespace attn_dispatch {
namespace {

// Kernels count rows, heads and pages in 32 bits.
constexpr int64_t kMostInt32 = (int64_t{1} << 31) - 1;

// The time of planning grows with the head dim: 2,048 takes 1 s, 32,768 takes 13 s (9.28).
constexpr int64_t kMostHeadDim = 4096;

// The bound holds for arrays with one row, too: cudnn/call.py declares no longest sequence of one
// query.
constexpr int64_t kLeastPackedQueries = 2;

constexpr struct {
  const char* name;
  int64_t SdpaSpec::* field;
  int64_t least, most;
} kRanges[] = {
    {"batch", &SdpaSpec::batch, 1, kMostInt32},
    {"num_heads", &SdpaSpec::num_heads, 1, kMostInt32},
    {"num_kv_heads", &SdpaSpec::num_kv_heads, 1, kMostInt32},
    {"seq_len_q", &SdpaSpec::seq_len_q, 1, kMostInt32},
    {"seq_len_kv", &SdpaSpec::seq_len_kv, 1, kMostInt32},
    {"head_dim", &SdpaSpec::head_dim, 1, kMostHeadDim},
    {"head_dim_v", &SdpaSpec::head_dim_v, 1, kMostHeadDim},
    {"window_left", &SdpaSpec::window_left, -1, kMostInt32 - 1},  // cuDNN's window_left is one more
    {"window_right", &SdpaSpec::window_right, -1, kMostInt32 - 1},
    {"packed_rows_q", &SdpaSpec::packed_rows_q, 0, kMostInt32},
    {"packed_rows_kv", &SdpaSpec::packed_rows_kv, 0, kMostInt32},
    {"head_rows_q", &SdpaSpec::head_rows_q, 0, kMostInt32},
    {"head_rows_kv", &SdpaSpec::head_rows_kv, 0, kMostInt32},
    {"page_size", &SdpaSpec::page_size, 0, kMostInt32},
    {"num_pages", &SdpaSpec::num_pages, 0, kMostInt32},
    {"bias_batch", &SdpaSpec::bias_batch, 1, kMostInt32},
    {"bias_heads", &SdpaSpec::bias_heads, 1, kMostInt32},
    {"bias_rows", &SdpaSpec::bias_rows, 1, kMostInt32},
};

bool is_16_bits(const Text& dtype) { return dtype == "float16" || dtype == "bfloat16"; }

// Refuses every value that is wrong whatever the other values are.
Status check_values(const SdpaSpec& s) {
  std::string wrong;
  const auto add = [&](const Status& status) {
    wrong += (wrong.empty() ? "" : "; ") + status.message;
  };
  for (const auto& [name, field, least, most] : kRanges) {
    if (s.*field < least || s.*field > most) {
      add(wrong_value(name, std::to_string(least) + " to " + std::to_string(most), s.*field));
    }
  }
  if (!is_16_bits(s.dtype)) add(wrong_value("dtype", "float16 or bfloat16", s.dtype));
  if (s.has_bias() && s.bias_dtype != "float32" && !is_16_bits(s.bias_dtype)) {
    add(wrong_value("bias_dtype", "float16, bfloat16, float32 or an empty text", s.bias_dtype));
  }
  if (!std::isfinite(s.scale)) add(wrong_value("scale", "a finite number", s.scale));
  // Written so that NaN is refused.
  if (!(s.dropout_rate >= 0 && s.dropout_rate < 1)) {
    add(wrong_value("dropout_rate", "at least 0 and less than 1", s.dropout_rate));
  }
  if (wrong.empty()) return {};
  return {Code::kWrongCall, wrong};
}

std::string one_or(const char* name, int64_t extent) {
  return "1 or " + std::string(name) + '=' + std::to_string(extent);
}

Status check_extents(const SdpaSpec& s) {
  if (s.num_heads % s.num_kv_heads != 0) {
    return wrong_value("num_heads", "a multiple of num_kv_heads=" + std::to_string(s.num_kv_heads),
                       s.num_heads);
  }
  // Strides must be multiples of 16 bytes: github.com/NVIDIA/cudnn-frontend/issues/1571.
  if (s.head_dim % 8 != 0) return wrong_value("head_dim", "a multiple of 8", s.head_dim);
  if (s.head_dim_v % 8 != 0) return wrong_value("head_dim_v", "a multiple of 8", s.head_dim_v);
  if (s.bias_batch != 1 && s.bias_batch != s.batch) {
    return wrong_value("bias_batch", one_or("batch", s.batch), s.bias_batch);
  }
  if (s.bias_heads != 1 && s.bias_heads != s.num_heads) {
    return wrong_value("bias_heads", one_or("num_heads", s.num_heads), s.bias_heads);
  }
  if (s.bias_rows != 1 && s.bias_rows != s.seq_len_q) {
    return wrong_value("bias_rows", one_or("seq_len_q", s.seq_len_q), s.bias_rows);
  }
  return {};
}

// Checks packed arrays, pages, and the order of heads and rows.
Status check_layout(const SdpaSpec& s) {
  if (s.is_packed() != (s.packed_rows_kv > 0)) {
    return wrong_value("packed_rows_kv",
                       std::string(s.is_packed() ? "rows" : "0") +
                           " beside packed_rows_q=" + std::to_string(s.packed_rows_q),
                       s.packed_rows_kv);
  }
  if (s.is_packed() && !s.has_lengths) {
    return wrong_value("has_lengths", "true where arrays are packed", s.has_lengths);
  }
  const struct {
    const char* name;
    int64_t longest, rows;
  } packed[] = {{"seq_len_q", s.seq_len_q, std::max(s.packed_rows_q, kLeastPackedQueries)},
                {"seq_len_kv", s.seq_len_kv, s.packed_rows_kv}};
  for (const auto& [name, longest, rows] : packed) {
    if (s.is_packed() && longest > rows) {
      return wrong_value(name, "at most " + std::to_string(rows) + ", the packed rows", longest);
    }
  }
  if (!s.is_paged() && s.num_pages != 0) {
    return wrong_value("num_pages", "0 beside page_size=0", s.num_pages);
  }
  if (!s.is_paged() && s.has_value_table) {
    return wrong_value("has_value_table", "false beside page_size=0", s.has_value_table);
  }
  if (s.is_paged()) {
    if (s.num_pages < 1) return wrong_value("num_pages", "pages beside a page_size", s.num_pages);
    if (s.backward) return wrong_value("page_size", "0 in a backward pass", s.page_size);
    if (s.is_packed()) return wrong_value("page_size", "0 where arrays are packed", s.page_size);
    if (!s.has_lengths) {
      return wrong_value("has_lengths", "true where keys are in pages", s.has_lengths);
    }
  }
  const struct {
    const char* name;
    int64_t head_rows, packed_rows, length;
  } sides[] = {{"head_rows_q", s.head_rows_q, s.packed_rows_q, s.seq_len_q},
               {"head_rows_kv", s.head_rows_kv, s.packed_rows_kv,
                s.is_paged() ? s.page_size : s.seq_len_kv}};
  for (const auto& [name, head_rows, packed_rows, length] : sides) {
    if (head_rows == 0) continue;
    // cudnn-frontend computes the sizes of float32 gradients wrong otherwise.
    if (s.backward && s.is_packed()) {
      return wrong_value(name, "0 in a backward pass of packed arrays", head_rows);
    }
    if (s.is_packed() ? packed_rows % head_rows != 0 : head_rows != length) {
      return wrong_value(name,
                         s.is_packed()
                             ? "0 or a divisor of the packed rows=" + std::to_string(packed_rows)
                             : "0 or the rows of a page or batch row=" + std::to_string(length),
                         head_rows);
    }
  }
  return {};
}

// Refuses options that are valid only together with others.
Status check_options(const SdpaSpec& s) {
  const struct {
    const char* name;
    bool value, is_valid;
    const char* expected;
  } rules[] = {
      {"needs_lse", s.needs_lse, !s.backward, "false in a backward pass"},
      {"needs_max", s.needs_max, !s.backward, "false in a backward pass"},
      {"needs_keep", s.needs_keep, !s.backward, "false in a backward pass"},
      {"needs_keep", s.needs_keep, s.dropout_rate > 0, "false beside dropout_rate=0"},
      {"has_sinks", s.has_sinks, !s.backward, "false in a backward pass"},
      {"needs_dbias", s.needs_dbias, s.backward, "false in a forward pass"},
      {"needs_dbias", s.needs_dbias, s.has_bias(), "false without a bias_dtype"},
  };
  for (const auto& [name, value, is_valid, expected] : rules) {
    if (value && !is_valid) return wrong_value(name, expected, value);
  }
  if (s.has_score_program() && !s.bends_scores && !s.moves_scores) {
    return wrong_value("moves_scores", "true, or bends_scores, beside score_nodes", s.moves_scores);
  }
  if (!s.gradient_nodes.empty() && !(s.backward && s.has_score_program())) {
    return wrong_value("gradient_nodes", "none, except in a backward pass with score_nodes",
                       s.gradient_nodes);
  }
  if (s.engine.empty()) return {};
  // An unsupported engine is not a wrong call: plan_to_run takes another engine.
  const Status engine = parse_engine(s.engine).status;
  return engine.code == Code::kWrongCall ? engine : Status{};
}

}  // namespace

Result<SdpaSpec> validated(SdpaSpec spec) {
  for (const auto check : {check_values, check_extents, check_layout, check_options}) {
    ATTN_RETURN_IF_ERROR(check(spec));
  }
  const auto arrays = node_arrays_of(spec);
  if (!arrays.ok()) return arrays.status;
  ATTN_RETURN_IF_ERROR(score_program_of(spec, arrays.value).status);
  ATTN_RETURN_IF_ERROR(buffers_of(spec).status);
  return spec;
}

}  // namespace attn_dispatch
