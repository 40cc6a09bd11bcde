// The static facts of one cuDNN call. The list below is the whole contract with Python: the same
// names are the attributes of the custom call and the keys of the dictionary that a probe passes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <locale>
#include <sstream>
#include <string>
#include <string_view>

namespace attn_dispatch {

// Owned text that can be made from the view an FFI attribute decodes to.
struct Text : std::string {
  Text() = default;
  Text(std::string_view view) : std::string(view) {}  // NOLINT: implicit on purpose
};

// FIELD(type, name) for each attribute.
// clang-format off
#define ATTN_SDPA_SPEC(FIELD)                                                   \
  FIELD(bool, backward)         /* else forward */                              \
  FIELD(Text, dtype)            /* "float16" or "bfloat16" */                   \
  FIELD(int64_t, batch)         /* packed: the sequences */                     \
  FIELD(int64_t, num_heads)                                                     \
  FIELD(int64_t, num_kv_heads)                                                  \
  FIELD(int64_t, seq_len_q)     /* packed: of the longest sequence */           \
  FIELD(int64_t, seq_len_kv)                                                    \
  FIELD(int64_t, head_dim)      /* of query and key, a multiple of 8 */         \
  FIELD(int64_t, head_dim_v)    /* of value and output, a multiple of 8 */      \
  FIELD(float, scale)                                                           \
  FIELD(int64_t, window_left)   /* keys seen left of the diagonal; -1: all */   \
  FIELD(int64_t, window_right)  /* keys seen right of it; -1: all */            \
  FIELD(bool, bottom_right)     /* where the diagonal ends, else top left */    \
  FIELD(bool, has_lengths)      /* lengths_q, lengths_kv are operands */        \
  FIELD(int64_t, packed_rows_q) /* rows of packed arrays; 0: not packed */      \
  FIELD(int64_t, packed_rows_kv)                                                \
  FIELD(int64_t, head_rows_q)   /* of a head, that follow one another; */       \
  FIELD(int64_t, head_rows_kv)  /* 0: the heads of a row do */                      \
  FIELD(int64_t, page_size)     /* of key and value in pages; 0: they are not */ \
  FIELD(int64_t, num_pages)     /* that there are of them */                    \
  FIELD(bool, has_value_table)  /* values have a page table of their own */     \
  FIELD(bool, bends_scores)     /* by more than what is added to them */        \
  FIELD(bool, moves_scores)     /* by more than a soft cap */                   \
  FIELD(Text, score_nodes)      /* how: score_program.h; "": they do not */     \
  FIELD(Text, gradient_nodes)   /* backward: of its gradient; "": 1 */          \
  FIELD(Text, node_arrays)      /* what they read: "f 1 8 1 1, i 1 1 1 300" */  \
  FIELD(Text, bias_dtype)       /* "" where there is no bias */                 \
  FIELD(int64_t, bias_batch)    /* 1 or batch */                                \
  FIELD(int64_t, bias_heads)    /* 1 or num_heads */                            \
  FIELD(int64_t, bias_rows)     /* 1 or seq_len_q */                            \
  FIELD(bool, has_sinks)        /* forward; lse is all that backward needs */   \
  FIELD(float, dropout_rate)    /* 0: none; else a seed is an operand */        \
  FIELD(bool, needs_lse)        /* forward: write the log-sum-exp */            \
  FIELD(bool, needs_max)        /* forward: write row maximum and sum */        \
  FIELD(bool, needs_keep)       /* forward: write the dropout mask */           \
  FIELD(bool, deterministic)    /* the same bits in every call */               \
  FIELD(bool, needs_dbias)      /* backward */                                  \
  FIELD(bool, clears_rows)      /* flags of rows are operands */                \
  FIELD(Text, engine)           /* engine.h; "": the heuristics' */
// clang-format on

// Keys of a bias's rows in memory: strides must be multiples of 16 bytes.
inline constexpr int64_t kBiasRowMultiple = 8;

// Its sums and products are those of a spec that is in order: validate.h.
struct SdpaSpec {
#define FIELD(type, name) type name{};
  ATTN_SDPA_SPEC(FIELD)
#undef FIELD

  int64_t rows_q() const { return is_packed() ? packed_rows_q : batch * seq_len_q; }
  int64_t rows_kv() const { return is_packed() ? packed_rows_kv : batch * seq_len_kv; }
  bool is_packed() const { return packed_rows_q > 0; }
  bool is_paged() const { return page_size > 0; }
  // Of one sequence.
  int64_t most_pages() const { return (seq_len_kv + page_size - 1) / page_size; }
  // Of the largest packed array.
  int64_t packed_elements() const {
    return std::max(packed_rows_q * num_heads, packed_rows_kv * num_kv_heads) *
           std::max(head_dim, head_dim_v);
  }
  // Of a bias, padded.
  int64_t bias_row() const {
    return (seq_len_kv + kBiasRowMultiple - 1) / kBiasRowMultiple * kBiasRowMultiple;
  }
  bool has_bias() const { return !bias_dtype.empty(); }
  bool has_statistics() const { return backward || needs_lse || needs_max; }
  bool has_score_program() const { return !score_nodes.empty(); }
  bool has_band() const { return window_left >= 0 || window_right >= 0; }

  // A name for this spec that no other spec has: the first part of every cache key.
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
