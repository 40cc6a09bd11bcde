#include "call_site.h"

#include <limits>
#include <string_view>

namespace attn_dispatch {
namespace {

constexpr int64_t kMostSplits = 128;  // that CK's kernels combine

struct Choice {
  std::string_view text;
  int32_t number;
};

constexpr Choice kMasks[] = {
    {"none", ATTN_AITER_NO_MASK},
    {"top_left", ATTN_AITER_TOP_LEFT},
    {"bottom_right", ATTN_AITER_BOTTOM_RIGHT},
};
constexpr Choice kBiases[] = {
    {"none", ATTN_AITER_NO_BIAS},
    {"bias", ATTN_AITER_BIAS},
    {"alibi", ATTN_AITER_ALIBI},
};
constexpr Choice kAccumulators[] = {
    {"split", ATTN_AITER_SPLIT},
    {"atomic_32", ATTN_AITER_ATOMIC_32},
    {"atomic_16", ATTN_AITER_ATOMIC_16},
};

// Collects the first thing that is wrong.
struct Decoder {
  std::string error;

  template <size_t N>
  int32_t choice(const char* name, std::string_view value, const Choice (&choices)[N]) {
    std::string known;
    for (const auto& [text, number] : choices) {
      if (text == value) return number;
      known += (known.empty() ? "" : ", ") + std::string(text);
    }
    fail(name, "one of " + known, std::string(value));
    return 0;
  }

  int32_t number(const char* name, int64_t value, int64_t least, int64_t most) {
    if (value < least || value > most) {
      fail(name, std::to_string(least) + " to " + std::to_string(most), std::to_string(value));
    }
    return static_cast<int32_t>(value);
  }

  void fail(const char* name, const std::string& expected, const std::string& got) {
    if (error.empty()) error = std::string(name) + ": expected " + expected + ", got " + got;
  }
};

}  // namespace

std::string decode(const Attributes& attributes, CallSite& site) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  Decoder decoder;
  site.arch = std::string(attributes.arch);
  site.call.max_seq_len_q = decoder.number("max_seq_len_q", attributes.max_seq_len_q, 0, kMost);
  site.call.max_seq_len_kv = decoder.number("max_seq_len_kv", attributes.max_seq_len_kv, 0, kMost);
  site.call.scale = attributes.scale;
  site.call.dropout_rate = attributes.dropout_rate;
  site.call.mask = decoder.choice("mask", attributes.mask, kMasks);
  site.call.window_left = decoder.number("window_left", attributes.window_left, -1, kMost);
  site.call.window_right = decoder.number("window_right", attributes.window_right, -1, kMost);
  site.call.bias_kind = decoder.choice("bias", attributes.bias, kBiases);
  site.call.use_asm = attributes.use_asm;
  site.call.bf16_rounding = decoder.number("bf16_rounding", attributes.bf16_rounding, 0, 2);
  site.has_gaps = attributes.has_gaps;
  site.logits_soft_cap = attributes.logits_soft_cap;
  site.needs_lse = attributes.needs_lse;
  site.accumulator = static_cast<AttnAiterAccumulator>(
      decoder.choice("accumulator", attributes.accumulator, kAccumulators));
  site.deterministic = attributes.deterministic;
  site.has_dbias = attributes.has_dbias;
  site.is_paged = attributes.is_paged;
  site.heads_first_kv = attributes.heads_first_kv;
  site.value_page =
      decoder.number("value_page", attributes.value_page, 0, attributes.is_paged ? kMost : 0);
  site.num_splits = decoder.number("num_splits", attributes.num_splits, 1, kMostSplits);
  return decoder.error;
}

}  // namespace attn_dispatch
