#include "known_bad.h"

#include <cfloat>
#include <limits>

namespace attn_dispatch {
namespace {

struct KnownBad {
  const char* name;
  int64_t first_version;  // inclusive, 91900 for 9.19.0
  int64_t last_version;   // inclusive; kStillOpen if no version is known to be fixed
  bool (*matches)(const SdpaSpec& spec, int64_t sm);
  const char* sentence;
  const char* source;
};

constexpr int64_t kFirst = 0;
constexpr int64_t kStillOpen = 999999;

constexpr KnownBad kTable[] = {
    {"one_of_everything_backward", kFirst, kStillOpen,
     [](const SdpaSpec& s, int64_t) {
       return s.backward && s.batch == 1 && s.num_heads == 1 && s.num_kv_heads == 1 &&
              s.seq_len_q == 1;
     },
     "planning a backward pass with batch, heads and query length all 1 crashes cuDNN",
     "github.com/NVIDIA/cudnn-frontend/issues/1071"},
    {"one_query_backward", kFirst, kStillOpen,
     [](const SdpaSpec& s, int64_t) { return s.backward && s.seq_len_q == 1 && !s.has_lengths; },
     "a backward pass with query length 1 and no padding mask can return NaN dK and dV",
     "github.com/NVIDIA/cudnn-frontend/issues/1072 and 160"},
    {"sm90_half_tile_backward", kFirst, kStillOpen,
     [](const SdpaSpec& s, int64_t sm) {
       // A causal mask hides the tail of the last key tile, unless there are more rows than keys.
       const bool tail_hidden = s.window_right == 0 && s.seq_len_q <= s.seq_len_kv;
       return s.backward && sm == 90 && s.seq_len_kv % 128 == 64 && !tail_hidden && !s.has_lengths;
     },
     "the SM90 backward pass with key length 64 modulo 128 returns NaN dQ for rows whose "
     "log-sum-exp is below -88.7",
     "github.com/pytorch/pytorch/issues/196678 and github.com/NVIDIA/cudnn-frontend/pull/628"},
    {"bias_gradient_small_scale", kFirst, kStillOpen,
     [](const SdpaSpec& s, int64_t) {
       return s.needs_dbias && s.scale < (s.dtype == "float16" ? 0x1p-8 : 0x1p-100);
     },
     "the gradient of a bias is rounded after it was multiplied by the scale, and a small scale "
     "leaves nothing of it",
     "measured on an H200 with 9.19"},
    {"deterministic_narrow_value", kFirst, 92799,
     [](const SdpaSpec& s, int64_t) {
       return s.backward && s.deterministic && s.head_dim > 128 && s.head_dim_v < s.head_dim;
     },
     "the deterministic backward pass of a head dim beyond 128 and a smaller value dim can write "
     "garbage into dQ (not seen with 9.28)",
     "measured on an H200 with 9.19"},
    {"bias_gradient_narrow_value", kFirst, kStillOpen,
     [](const SdpaSpec& s, int64_t) {
       return s.needs_dbias && s.head_dim > 128 && s.head_dim_v < s.head_dim;
     },
     "a backward pass with the gradient of a bias, a head dim beyond 128 and a smaller value dim "
     "can write garbage into every gradient",
     "measured on an H200 with 9.19"},
    {"one_query_order", kFirst, 92799,
     [](const SdpaSpec& s, int64_t) {
       return !s.backward && s.deterministic && s.seq_len_q == 1 && !s.is_packed();
     },
     "the kernel that splits the keys of a single query adds its parts up in another order from "
     "call to call (not seen with 9.28)",
     "measured on an H200 with 9.19"},
    {"bias_gradient_soft_cap", kFirst, kStillOpen,
     [](const SdpaSpec& s, int64_t) { return s.needs_dbias && s.bends_scores; },
     "the gradient of a bias under a soft cap is off by orders of magnitude",
     "measured on an H200 with 9.19"},
    {"packed_one_query", kFirst, kStillOpen,
     [](const SdpaSpec& s, int64_t) { return s.is_packed() && s.seq_len_q == 1; },
     "packed sequences of one query get a wrong log-sum-exp", "measured on an H200 with 9.19"},
    {"one_pair_soft_cap_bias", kFirst, kStillOpen,
     [](const SdpaSpec& s, int64_t) {
       return !s.backward && s.bends_scores && s.has_bias() && s.seq_len_q == 1 &&
              s.seq_len_kv == 1;
     },
     "one query and one key with soft cap and a bias can get a wrong log-sum-exp",
     "measured on an H200 with 9.19"},
    {"row_max_sinks", 92000, kStillOpen,
     [](const SdpaSpec& s, int64_t) { return s.needs_max && s.has_sinks; },
     "the row maximum counts the sink as a score (right with 9.19)",
     "measured on an H100 with 9.28"},
    {"one_query_dropout", kFirst, kStillOpen,
     [](const SdpaSpec& s, int64_t) { return s.dropout_rate > 0 && s.seq_len_q == 1; },
     "dropout of a single query drops other entries than its mask says, and writes past shared "
     "memory",
     "measured on an H100 with 9.19"},
    {"one_query_alibi", kFirst, kStillOpen,
     [](const SdpaSpec& s, int64_t) {
       return !s.backward && s.moves_scores && s.seq_len_q == 1 && !s.is_packed() &&
              s.window_left < 0 && s.window_right < 0;
     },
     "the kernel that splits the keys of a single query gets ALiBi wrong",
     "measured on an H200 with 9.19"},
    {"soft_cap_bias_backward", kFirst, kStillOpen,
     [](const SdpaSpec& s, int64_t) {
       const bool adds = s.moves_scores || s.has_bias();
       return s.backward && s.bends_scores && adds && s.seq_len_kv % 128 != 0 && !s.has_lengths;
     },
     "a backward pass with soft cap and a bias, a mask or ALiBi returns NaN dQ for rows whose "
     "log-sum-exp is below -88.7, unless the key length is a multiple of 128",
     "measured on an H200 with 9.19"},
    {"head_dim_192_backward", kFirst, kStillOpen,
     [](const SdpaSpec& s, int64_t) {
       const bool is_its_own = s.head_dim == 192 && s.head_dim_v == 128;
       return s.backward && !s.has_lengths && s.head_dim > 128 && s.head_dim <= 192 &&
              s.head_dim_v > 64 && s.head_dim_v <= 128 && !is_its_own;
     },
     "the backward pass made for head dim 192 and value dim 128 can return NaN dQ for smaller "
     "ones, in rows whose log-sum-exp is below -88 (correct with value padded to the head dim)",
     "measured on an H200 with 9.19"},
    {"packed_narrow_value_backward", kFirst, 92799,
     [](const SdpaSpec& s, int64_t) {
       return s.backward && s.is_packed() && s.head_dim > 192 && s.head_dim_v < s.head_dim;
     },
     "the backward pass of packed sequences with a head dim beyond 192 and a smaller value dim "
     "writes garbage (correct with value padded to the head dim, and with 9.28)",
     "measured on an H100 with 9.19"},
    {"scale_not_normal", kFirst, kStillOpen,
     [](const SdpaSpec& s, int64_t) { return !(s.scale >= FLT_MIN && s.scale <= FLT_MAX / 4); },
     "a scale that is not a positive normal float32 gives NaN; negate the query for one below 0",
     "measured on an H100 with 9.19"},
    {"packed_offsets_int32", kFirst, kStillOpen,
     [](const SdpaSpec& s, int64_t) {
       return s.is_packed() && s.packed_elements() > std::numeric_limits<int32_t>::max();
     },
     "the offsets of packed arrays are 32-bit numbers, and an array has 2^31 elements or more",
     "measured on an H100 with 9.19"},
    {"launch_grid", kFirst, kStillOpen,
     [](const SdpaSpec& s, int64_t) { return s.batch > 65535 || s.num_heads > 65535; },
     "batch and heads beyond 65535 exceed the launch grid",
     "github.com/pytorch/pytorch/issues/180718"},
    {"graph_capture", 91400, 91400,
     [](const SdpaSpec& s, int64_t) { return s.window_right < 0 && s.seq_len_kv > 1024; },
     "9.14.0 breaks when non-causal attention with more than 1024 keys is captured in a graph",
     "github.com/NVIDIA/TransformerEngine/pull/2344"},
    {"few_kv_heads_sm100", 91900, 92099,
     [](const SdpaSpec& s, int64_t sm) { return sm / 10 == 10 && s.num_kv_heads < 8; },
     "9.19 and 9.20 corrupt results on SM100 with fewer than 8 key/value heads",
     "github.com/pytorch/pytorch/issues/193893"},
};

}  // namespace

std::vector<std::string> known_bad_reasons(const SdpaSpec& spec, int64_t version, int64_t sm) {
  std::vector<std::string> reasons;
  for (const KnownBad& row : kTable) {
    if (version < row.first_version || version > row.last_version) continue;
    if (!row.matches(spec, sm)) continue;
    reasons.push_back(std::string("known bug ") + row.name + " of cuDNN " +
                      std::to_string(version) + ": " + row.sentence + " (" + row.source + ")");
  }
  return reasons;
}

}  // namespace attn_dispatch
