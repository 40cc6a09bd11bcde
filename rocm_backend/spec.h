// The attributes of AITER's custom calls: the static facts that the buffers do not show. Python
// writes the same list (dispatch/attn_dispatch/aiter).
#pragma once

#include <cstdint>
#include <string_view>

namespace attn_dispatch {

// The generations of AITER's C++ interface, after which the adapter's files are named.
inline constexpr std::string_view kGenerations[] = {"dev18", "v0.1.15"};

// FIELD(type, name) for each attribute.
// clang-format off
#define ATTN_AITER_SPEC(FIELD)                                                        \
  FIELD(std::string_view, arch)        /* "gfx942", for which it was lowered */       \
  FIELD(std::string_view, generation)  /* "dev18", of AITER, likewise */              \
  FIELD(int64_t, max_seq_len_q)        /* group mode: the longest sequence */         \
  FIELD(int64_t, max_seq_len_kv)                                                      \
  FIELD(bool, has_gaps)                /* group mode: sequences have lengths */       \
  FIELD(float, scale)                                                                 \
  FIELD(float, logits_soft_cap)        /* 0 is none */                                \
  FIELD(float, dropout_rate)                                                          \
  FIELD(std::string_view, mask)        /* "none", "top_left", "bottom_right" */       \
  FIELD(int64_t, window_left)          /* -1 is open */                               \
  FIELD(int64_t, window_right)                                                        \
  FIELD(std::string_view, bias)        /* "none", "bias", "alibi" */                  \
  FIELD(bool, use_asm)                                                                \
  FIELD(int64_t, bf16_rounding)                                                       \
  FIELD(bool, needs_lse)               /* forward, split-KV */                        \
  FIELD(std::string_view, accumulator) /* backward: "split", "atomic_32", … */        \
  FIELD(bool, deterministic)           /* backward */                                 \
  FIELD(bool, has_dbias)               /* backward */                                 \
  FIELD(bool, is_paged)                /* split-KV */                                 \
  FIELD(bool, heads_first_kv)          /* split-KV: of keys and values */             \
  FIELD(int64_t, value_page)           /* split-KV: pages from keys to values */      \
  FIELD(int64_t, num_splits)           /* split-KV */
// clang-format on

}  // namespace attn_dispatch
