// The static facts of one cuDNN call. The list below is the contract with Python: its names are the
// attributes of the custom call, and the keys of the dictionary that Python passes to plan a call.
#pragma once

#include <algorithm>
#include <cstdint>
#include <locale>
#include <sstream>
#include <string>
#include <string_view>

namespace attn_dispatch {

// Owned text that is constructed from a view, as which FFI decodes a text attribute.
struct Text : std::string {
  Text() = default;
  Text(std::string_view view) : std::string(view) {}  // NOLINT: implicit on purpose
};

// FIELD(type, name) for each attribute.
// clang-format off
#define ATTN_SDPA_SPEC(FIELD)                                                             \
  FIELD(bool, backward)         /* else forward */                                        \
  FIELD(Text, dtype)            /* "float16" or "bfloat16" */                             \
  FIELD(int64_t, batch)         /* packed: the number of sequences */                     \
  FIELD(int64_t, num_heads)                                                               \
  FIELD(int64_t, num_kv_heads)                                                            \
  FIELD(int64_t, seq_len_q)     /* packed: the longest sequence */                        \
  FIELD(int64_t, seq_len_kv)                                                              \
  FIELD(int64_t, head_dim)      /* of query and key; a multiple of 8 */                   \
  FIELD(int64_t, head_dim_v)    /* of value and output; a multiple of 8 */                \
  FIELD(float, scale)                                                                     \
  FIELD(int64_t, window_left)   /* keys visible left of the diagonal; -1: all */          \
  FIELD(int64_t, window_right)  /* keys visible right of the diagonal; -1: all */         \
  FIELD(bool, bottom_right)     /* the diagonal ends there; else it starts top left */    \
  FIELD(bool, has_lengths)      /* lengths_q, lengths_kv are operands */                  \
  FIELD(int64_t, packed_rows_q) /* rows of packed arrays; 0: not packed */                \
  FIELD(int64_t, packed_rows_kv)                                                          \
  FIELD(int64_t, head_rows_q)   /* contiguous rows of a head, where heads are first; */   \
  FIELD(int64_t, head_rows_kv)  /* 0: the heads of a row are contiguous */                \
  FIELD(int64_t, page_size)     /* keys in a page; 0: keys are not in pages */            \
  FIELD(int64_t, num_pages)     /* pages of key, and of value */                          \
  FIELD(bool, has_value_table)  /* value has a page table besides that of key */          \
  FIELD(bool, bends_scores)     /* the gradient of the scores changes too */              \
  FIELD(bool, moves_scores)     /* score_mod, mask_mod or ALiBi is applied */             \
  FIELD(Text, score_nodes)      /* the score program (score_program.h); "": none */       \
  FIELD(Text, gradient_nodes)   /* backward: the program of the gradient; "": 1 */        \
  FIELD(Text, node_arrays)      /* arrays the programs read: "f 1 8 1 1, i 1 1 1 300" */  \
  FIELD(Text, bias_dtype)       /* "": there is no bias */                                \
  FIELD(int64_t, bias_batch)    /* 1 or batch */                                          \
  FIELD(int64_t, bias_heads)    /* 1 or num_heads */                                      \
  FIELD(int64_t, bias_rows)     /* 1 or seq_len_q */                                      \
  FIELD(bool, has_sinks)        /* forward only: for backward, lse has them */            \
  FIELD(float, dropout_rate)    /* 0: none; otherwise seeds are operands */               \
  FIELD(bool, needs_lse)        /* forward: write the log-sum-exp */                      \
  FIELD(bool, needs_max)        /* forward: write row maximum and sum */                  \
  FIELD(bool, needs_keep)       /* forward: write the dropout mask */                     \
  FIELD(bool, deterministic)    /* the same bits in every call */                         \
  FIELD(bool, needs_dbias)      /* backward */                                            \
  FIELD(bool, clears_rows)      /* flags of rows are operands (clear_rows.h) */           \
  FIELD(Text, engine)           /* see engine.h; "": that of the heuristics */
// clang-format on

// The rows of a bias are padded to a multiple of this many keys: cuDNN wants strides of 16 bytes.
inline constexpr int64_t kBiasRowMultiple = 8;

// The computed sizes below assume a validated spec (validate.h).
struct SdpaSpec {
#define FIELD(type, name) type name{};
  ATTN_SDPA_SPEC(FIELD)
#undef FIELD

  int64_t rows_q() const { return is_packed() ? packed_rows_q : batch * seq_len_q; }
  int64_t rows_kv() const { return is_packed() ? packed_rows_kv : batch * seq_len_kv; }
  bool is_packed() const { return packed_rows_q > 0; }
  bool is_paged() const { return page_size > 0; }
  // The most pages of one sequence.
  int64_t most_pages() const { return (seq_len_kv + page_size - 1) / page_size; }
  // The elements of the largest packed array.
  int64_t packed_elements() const {
    return std::max(packed_rows_q * num_heads, packed_rows_kv * num_kv_heads) *
           std::max(head_dim, head_dim_v);
  }
  // The keys in a row of the bias, with its padding.
  int64_t bias_row() const {
    return (seq_len_kv + kBiasRowMultiple - 1) / kBiasRowMultiple * kBiasRowMultiple;
  }
  bool has_bias() const { return !bias_dtype.empty(); }
  bool has_statistics() const { return backward || needs_lse || needs_max; }
  bool has_score_program() const { return !score_nodes.empty(); }
  bool has_band() const { return window_left >= 0 || window_right >= 0; }

  // A text that no other spec has: the first part of every cache key.
  std::string key() const {
    std::ostringstream out;
    out.imbue(std::locale::classic());
    out.precision(9);
#define FIELD(type, name) out << #name "=" << name << ' ';
    ATTN_SDPA_SPEC(FIELD)
#undef FIELD
    return out.str();
  }
};

}  // namespace attn_dispatch
