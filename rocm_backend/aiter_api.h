// The calls of AITER that this project makes, as plain C structs. This is the boundary between the
// FFI handlers, which any C++ compiler builds, and AITER's headers, which only the
// files of a generation, such as aiter_dev18_*.cc, include.
//
// A library that serves these structs exports attn_dispatch_aiter(). There are two: the adapter in
// front of AITER, and the emulator of the tests. Nothing here throws, allocates device memory,
// synchronizes or reads device memory; a failure is a sentence.
//
// Strides count elements, and the last axis of every array is contiguous. "Group mode" is AITER's
// name for packed sequences: seqstart_* [batch + 1], on the device, say at which row each sequence
// starts. A sequence may end before the next one starts: then it has seqlen_* [batch] rows, or, for
// generation "v0.1.15", as many as the difference of its prefix sums cu_seqlen_* [batch + 1]. The
// rows between its end and the next start are never read or written.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// The version of this file. A library of another version is refused.
#define ATTN_AITER_API_VERSION 5

enum AttnAiterDtype { ATTN_AITER_FP16 = 0, ATTN_AITER_BF16 = 1 };

// Where the diagonal starts. A window (left, right) is inclusive and -1 is open; causal is (-1, 0).
enum AttnAiterMask { ATTN_AITER_NO_MASK = 0, ATTN_AITER_TOP_LEFT = 1, ATTN_AITER_BOTTOM_RIGHT = 2 };

enum AttnAiterBias { ATTN_AITER_NO_BIAS = 0, ATTN_AITER_BIAS = 1, ATTN_AITER_ALIBI = 2 };

// How the backward pass gathers the gradient of the queries, and so the layout of dq_acc.
enum AttnAiterAccumulator {
  // CK: float32 [splits, batch, seq_len_q, num_heads, head_dim], in group mode without the batch
  // axis. One split, or as many as there are blocks of keys where the sum must be deterministic.
  ATTN_AITER_SPLIT = 0,
  // ASM: float32 [batch, num_heads, seq_len_q, head_dim], in group mode without the batch axis.
  ATTN_AITER_ATOMIC_32 = 1,
  // ASM: query's dtype [batch, num_heads, ceil16(seq_len_q), 128], also in group mode, where
  // seq_len_q is the largest there. Head dim 192 has rows of 192; no other above 128 has a kernel.
  ATTN_AITER_ATOMIC_16 = 2,
};

// What all three calls need.
struct AttnAiterCall {
  const void* q;
  const void* k;
  const void* v;
  const void* bias;           // q's dtype, or float32 ALiBi slopes, or null
  const int32_t* seqstart_q;  // group mode, else null
  const int32_t* seqstart_k;
  const int32_t* seqlen_q;     // group mode with gaps, generation "dev18", else null
  const int32_t* seqlen_k;     // also in split-KV calls, where it is required
  const int32_t* cu_seqlen_q;  // group mode with gaps, generation "v0.1.15", else null
  const int32_t* cu_seqlen_k;
  const uint64_t* rng_state;  // {seed, offset} on the device; null without dropout

  int32_t dtype;  // AttnAiterDtype
  int32_t is_group;
  int32_t batch;      // group mode: the number of sequences
  int32_t seq_len_q;  // group mode: rows of the packed arrays
  int32_t seq_len_kv;
  int32_t max_seq_len_q;  // of one sequence; without groups seq_len_q
  int32_t max_seq_len_kv;
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t head_dim_v;

  float scale;
  float dropout_rate;

  int32_t mask;  // AttnAiterMask
  int32_t window_left;
  int32_t window_right;
  int32_t bias_kind;  // AttnAiterBias

  int32_t use_asm;        // else CK
  int32_t bf16_rounding;  // by ASM kernels: 0 nearest even, 1 nearest away, 2 towards zero

  int32_t stride_q;  // from one row to the next
  int32_t stride_k;
  int32_t stride_v;
  int32_t stride_bias;  // ALiBi: from one batch row's slopes to the next, or 0
  int32_t stride_out;
  int32_t nhead_stride_q;
  int32_t nhead_stride_k;
  int32_t nhead_stride_v;
  int32_t nhead_stride_bias;
  int32_t nhead_stride_out;
  int32_t nhead_stride_lse;
  int32_t batch_stride_q;  // 0 in group mode, as are the other batch strides
  int32_t batch_stride_k;
  int32_t batch_stride_v;
  int32_t batch_stride_bias;
  int32_t batch_stride_out;
  int32_t batch_stride_lse;
};

struct AttnAiterForward {
  struct AttnAiterCall call;
  float logits_soft_cap;  // 0 is none
  void* out;
  float* lse;  // null if not wanted
};

// The forward pass of a few queries over long rows of keys, which are split among workgroups by
// CK's split-KV kernels. They need `call.seqlen_k`, and have no group mode, dropout or ASM. The
// keys of a row end at its length; neither keys nor entries of the page table are read beyond it.
struct AttnAiterSplitKv {
  struct AttnAiterCall call;  // with pages, batch_stride_k and batch_stride_v go from page to page
  float logits_soft_cap;      // 0 is none
  void* out;
  float* lse;      // null if not wanted
  float* lse_acc;  // scratch: lse, and the output divided by the sum, of each split
  float* out_acc;

  const int32_t* page_table;  // [batch, ...] page numbers; null where keys are not in pages
  int32_t num_pages;
  int32_t page_size;  // keys in a page; 0 without pages
  int32_t batch_stride_page_table;
  int32_t num_splits;

  int32_t stride_out_acc;
  int32_t nhead_stride_lse_acc;
  int32_t nhead_stride_out_acc;
  int32_t batch_stride_lse_acc;
  int32_t batch_stride_out_acc;
  int32_t split_stride_lse_acc;
  int32_t split_stride_out_acc;
};

struct AttnAiterBackward {
  struct AttnAiterCall call;
  const void* out;
  const float* lse;
  const void* out_grad;
  void* dq;
  void* dk;  // one head per query head, whatever num_kv_heads is
  void* dv;
  void* dbias;       // [batch, seq_len_q, num_heads, seq_len_kv], or null
  float* softmax_d;  // scratch with lse's strides
  void* dq_acc;      // scratch, zeroed by the caller where AITER adds to it
  int64_t dq_acc_bytes;

  int32_t accumulator;  // AttnAiterAccumulator
  int32_t is_deterministic;

  int32_t stride_out_grad;
  int32_t stride_dq;
  int32_t stride_dk;
  int32_t stride_dv;
  int32_t stride_dbias;
  int32_t stride_dq_acc;
  int32_t nhead_stride_out_grad;
  int32_t nhead_stride_dq;
  int32_t nhead_stride_dk;
  int32_t nhead_stride_dv;
  int32_t nhead_stride_dbias;
  int32_t nhead_stride_dq_acc;
  int32_t batch_stride_out_grad;
  int32_t batch_stride_dq;
  int32_t batch_stride_dk;
  int32_t batch_stride_dv;
  int32_t batch_stride_dbias;
  int32_t batch_stride_dq_acc;
  int32_t split_stride_dq_acc;
};

struct AttnAiter {
  int32_t api_version;     // ATTN_AITER_API_VERSION
  const char* generation;  // of AITER's C++ interface: "dev18", "v0.1.15"
  const char* arch;        // the gfx name that the kernels are built for; null if they run on any

  // Writes the gfx name of the current device ("gfx942") to `arch`. Returns 0, or 1 with a sentence
  // in `message`, as the others do.
  int (*device_arch)(char* arch, int32_t arch_size, char* message, int32_t message_size);

  // Queue the call on `stream`, a hipStream_t.
  int (*forward)(const struct AttnAiterForward*, void* stream, char* message, int32_t size);
  int (*backward)(const struct AttnAiterBackward*, void* stream, char* message, int32_t size);
  int (*split_kv)(const struct AttnAiterSplitKv*, void* stream, char* message, int32_t size);

  // Whether AITER would run this call with an ASM kernel: 1 or 0, or -1 with a sentence. They
  // launch nothing and follow no pointer.
  int (*forward_takes_asm)(const struct AttnAiterForward*, char* message, int32_t size);
  int (*backward_takes_asm)(const struct AttnAiterBackward*, char* message, int32_t size);
};

// The one exported function.
const struct AttnAiter* attn_dispatch_aiter(void);

#ifdef __cplusplus
}
#endif
