#include "call_site.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <string>
#include <string_view>

#include "wrong_value.h"

namespace attn_dispatch {
namespace {

constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
constexpr int64_t kMostSplits = 128;  // CK's kernels combine no more

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

// Checks attributes, and keeps the first error.
struct Decoder {
  Status status;

  template <size_t N>
  int32_t choice(const char* name, std::string_view value, const Choice (&choices)[N]) {
    std::string known;
    for (const auto& [word, number] : choices) {
      if (word == value) return number;
      known += (known.empty() ? "" : ", ") + std::string(word);
    }
    fail(name, "one of " + known, value);
    return 0;
  }

  int32_t number(const char* name, int64_t value, int64_t least, int64_t most) {
    if (value < least || value > most) {
      fail(name, to_text(least) + " to " + to_text(most), value);
    }
    return static_cast<int32_t>(value);
  }

  // `is_in_range` is false for NaN, as every comparison with NaN is.
  float number(const char* name, float value, bool is_in_range, const char* expected) {
    if (!is_in_range || !std::isfinite(value)) fail(name, expected, value);
    return value;
  }

  // Refuses a value other than `neutral` where the attribute does not apply.
  template <typename Value>
  void only(const char* name, Value value, Value neutral, bool applies, const char* where) {
    if (!applies && value != neutral) fail(name, to_text(neutral) + ", except " + where, value);
  }

  template <typename Value>
  void fail(const char* name, const std::string& expected, const Value& value) {
    if (status.ok()) status = wrong_value(name, expected, value);
  }
};

void check_pass(const Attributes& a, Pass pass, Decoder& decoder) {
  const bool is_split = pass == Pass::kSplitKv, is_backward = pass == Pass::kBackward;
  constexpr const char* kBackward = "in a backward pass";
  constexpr const char* kForward = "in a forward pass";
  constexpr const char* kSplit = "in a split-KV call";
  decoder.only("needs_lse", a.needs_lse, false, !is_backward, kForward);
  decoder.only("logits_soft_cap", a.logits_soft_cap, 0.0f, !is_backward, kForward);
  decoder.only("deterministic", a.deterministic, false, is_backward, kBackward);
  decoder.only("has_dbias", a.has_dbias, false, is_backward && a.bias == "bias",
               "in a backward pass with a bias");
  decoder.only("accumulator", a.accumulator, std::string_view("split"), is_backward && a.use_asm,
               "in a backward pass by ASM");
  decoder.only("is_paged", a.is_paged, false, is_split, kSplit);
  decoder.only("heads_first_kv", a.heads_first_kv, false, is_split, kSplit);
  decoder.only("value_page", a.value_page, int64_t{0}, is_split && a.is_paged,
               "with keys in pages");
  decoder.only("num_splits", a.num_splits, int64_t{1}, is_split, kSplit);
  if (!is_split) return;
  constexpr const char* kWholeRows = "in calls other than split-KV";
  decoder.only("use_asm", a.use_asm, false, false, kWholeRows);
  decoder.only("has_gaps", a.has_gaps, false, false, kWholeRows);
  decoder.only("dropout_rate", a.dropout_rate, 0.0f, false, kWholeRows);
  if (a.bias == "bias") decoder.fail("bias", "none or alibi in a split-KV call", a.bias);
}

bool takes_prefix_sums(const Attributes& a) { return a.generation != "dev18"; }

// Refuses what ASM kernels lack: AITER would run the call without it, or lay dq_acc out for CK.
void check_asm(const Attributes& a, Pass pass, Decoder& decoder) {
  decoder.only("bf16_rounding", a.bf16_rounding, int64_t{0}, a.use_asm, "with use_asm");
  if (!a.use_asm) return;
  constexpr const char* kCk = "without use_asm";
  decoder.only("has_gaps", a.has_gaps, false, takes_prefix_sums(a), kCk);
  decoder.only("bias", a.bias, std::string_view("none"), false, kCk);
  decoder.only("dropout_rate", a.dropout_rate, 0.0f, false, kCk);
  decoder.only("logits_soft_cap", a.logits_soft_cap, 0.0f, false, kCk);
  decoder.only("deterministic", a.deterministic, false, false, kCk);
  if (pass == Pass::kBackward) {
    if (a.accumulator == "split") {
      decoder.fail("accumulator", "atomic_32 or atomic_16 with use_asm", a.accumulator);
    }
    return;
  }
  decoder.only("window_left", a.window_left, int64_t{-1}, false, kCk);
  if (a.window_right > 0) {
    decoder.fail("window_right", "-1 or 0 in a forward pass by ASM", a.window_right);
  }
}

}  // namespace

Result<CallSite> decode_call_site(const Attributes& attributes, Pass pass) {
  CallSite site;
  Decoder decoder;
  const float dropout = attributes.dropout_rate, cap = attributes.logits_soft_cap;
  site.arch = std::string(attributes.arch);
  site.generation = std::string(attributes.generation);
  if (std::find(std::begin(kGenerations), std::end(kGenerations), site.generation) ==
      std::end(kGenerations)) {
    decoder.fail("generation", "one of dev18, v0.1.15", attributes.generation);
  }
  site.takes_prefix_sums = takes_prefix_sums(attributes);
  site.call.max_seq_len_q = decoder.number("max_seq_len_q", attributes.max_seq_len_q, 1, kMost);
  site.call.max_seq_len_kv = decoder.number("max_seq_len_kv", attributes.max_seq_len_kv, 1, kMost);
  site.call.scale = decoder.number("scale", attributes.scale,
                                   std::isnormal(attributes.scale) && attributes.scale > 0,
                                   "a positive normal number");
  site.call.dropout_rate =
      decoder.number("dropout_rate", dropout, dropout >= 0 && dropout < 1, "0 to below 1");
  site.call.mask = decoder.choice("mask", attributes.mask, kMasks);
  site.call.window_left = decoder.number("window_left", attributes.window_left, -1, kMost);
  site.call.window_right = decoder.number("window_right", attributes.window_right, -1, kMost);
  site.call.bias_kind = decoder.choice("bias", attributes.bias, kBiases);
  site.call.use_asm = attributes.use_asm;
  site.call.bf16_rounding = decoder.number("bf16_rounding", attributes.bf16_rounding, 0, 2);
  site.has_gaps = attributes.has_gaps;
  site.logits_soft_cap =
      decoder.number("logits_soft_cap", cap, cap >= 0, "a finite number, 0 for none");
  site.needs_lse = attributes.needs_lse;
  site.accumulator = static_cast<AttnAiterAccumulator>(
      decoder.choice("accumulator", attributes.accumulator, kAccumulators));
  site.deterministic = attributes.deterministic;
  site.has_dbias = attributes.has_dbias;
  site.is_paged = attributes.is_paged;
  site.heads_first_kv = attributes.heads_first_kv;
  site.value_page = decoder.number("value_page", attributes.value_page, 0, kMost);
  site.num_splits = decoder.number("num_splits", attributes.num_splits, 1, kMostSplits);
  const bool has_mask = attributes.mask != "none";
  decoder.only("window_left", attributes.window_left, int64_t{-1}, has_mask, "under a mask");
  decoder.only("window_right", attributes.window_right, int64_t{-1}, has_mask, "under a mask");
  if (cap > 0) {
    decoder.only("bias", attributes.bias, std::string_view("none"), false,
                 "without logits_soft_cap");
  }
  check_pass(attributes, pass, decoder);
  check_asm(attributes, pass, decoder);
  if (!decoder.status.ok()) return decoder.status;
  return site;
}

}  // namespace attn_dispatch
