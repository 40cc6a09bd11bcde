// The static facts of one cuDNN call. The list below is the whole contract with Python: the same
// names are the attributes of the custom call and the keys of the dictionary that a probe passes.
#pragma once

#include <cstdint>
#include <sstream>
#include <string>
#include <string_view>

namespace attn_dispatch {

// Owned text that can be made from the view an FFI attribute decodes to.
struct Text : std::string {
  Text() = default;
  Text(std::string_view view) : std::string(view) {}  // NOLINT: implicit on purpose
};

// FIRST(type, name), then FIELD(type, name) for every further field.
// clang-format off
#define ATTN_SDPA_SPEC(FIRST, FIELD)                                          \
  FIRST(bool, backward)       /* else forward */                              \
  FIELD(Text, dtype)          /* "float16" or "bfloat16" */                   \
  FIELD(int64_t, batch)                                                       \
  FIELD(int64_t, num_heads)                                                   \
  FIELD(int64_t, num_kv_heads)                                                \
  FIELD(int64_t, seq_len_q)                                                   \
  FIELD(int64_t, seq_len_kv)                                                  \
  FIELD(int64_t, head_dim)    /* of query and key, a multiple of 8 */         \
  FIELD(int64_t, head_dim_v)  /* of value and output, a multiple of 8 */      \
  FIELD(float, scale)                                                         \
  FIELD(bool, is_causal)                                                      \
  FIELD(bool, bottom_right)   /* causal alignment, else top left */           \
  FIELD(bool, full_lengths)   /* two int32 [batch] operands give lengths */   \
  FIELD(bool, needs_lse)      /* forward: write the log-sum-exp */
// clang-format on

struct SdpaSpec {
#define FIELD(type, name) type name{};
  ATTN_SDPA_SPEC(FIELD, FIELD)
#undef FIELD

  // A name for this spec that no other spec has: the first part of every cache key.
  std::string key() const {
    std::ostringstream out;
    out.precision(9);
#define FIELD(type, name) out << #name "=" << name << ' ';
    ATTN_SDPA_SPEC(FIELD, FIELD)
#undef FIELD
    return out.str();
  }
};

}  // namespace attn_dispatch
