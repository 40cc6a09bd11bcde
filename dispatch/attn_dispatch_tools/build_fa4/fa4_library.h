/* The interface of libattn_dispatch_fa4.so, the library that `attn-dispatch build-fa4` links from
 * FlashAttention-4's compiled kernels. cuda_backend/fa4 loads it.
 *
 * The library has no code but the kernels' own. What the kernels' host functions need of CUDA's
 * driver, they call through a table that the loader fills in. */
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Changes whenever anything in this file, or the arguments of a kernel, does. */
#define ATTN_DISPATCH_FA4_INTERFACE 6

/* The name of the function that the library exports, of type AttnFa4Get. */
#define ATTN_DISPATCH_FA4_GET "attn_dispatch_fa4_library"

/* The driver, as the host functions of kernels call it. Each function returns a CUresult. */
typedef struct {
  int32_t (*load_library)(void** library, const void* code, void* jit_options, void** jit_values,
                          uint32_t jit_count, void* options, void** values, uint32_t count);
  int32_t (*get_kernel)(void** kernel, void* library, const char* name);
  int32_t (*get_device)(int32_t* device);
  int32_t (*get_device_attribute)(int32_t* value, int32_t attribute, int32_t device);
  int32_t (*get_kernel_attribute)(int32_t* value, int32_t attribute, void* kernel, int32_t device);
  int32_t (*set_kernel_attribute)(void* kernel, int32_t attribute, int32_t value, int32_t device);
  int32_t (*launch)(const void* config, void* kernel, void** arguments);
} AttnFa4Driver;

/* The host functions of a kernel, as CUTLASS's DSL generates them. Each takes an array of pointers
 * to its arguments:
 *
 *   load            (library**, result)            loads the code; the library is for every device
 *   load_on_device  (library**, device, result)    prepares the kernel for one device
 *   run             (arrays ..., float scale, stream, result), and their number
 *
 * A result is an int32_t, and not 0 if the driver failed. */
typedef struct {
  void (*load)(void** arguments);
  void (*load_on_device)(void** arguments);
  void (*run)(void** arguments, int32_t count);
} AttnFa4Kernel;

/* An array as `run` takes it: an address, the extents that are not constant, from the outermost,
 * and their strides in elements, but for the innermost of a dense array. The number of extents and
 * strides depends on the array. */
#define ATTN_DISPATCH_FA4_ARRAY(name, extents, strides_) \
  typedef struct {                                       \
    void* data;                                          \
    int32_t shape[extents];                              \
    int64_t strides[strides_];                           \
  } name

ATTN_DISPATCH_FA4_ARRAY(AttnFa4Heads, 3, 2);   /* [batch, rows, heads, (head dim)], 16 bits */
ATTN_DISPATCH_FA4_ARRAY(AttnFa4Wide, 4, 3);    /* [batch, rows, heads, head dim], 16 bits */
ATTN_DISPATCH_FA4_ARRAY(AttnFa4Numbers, 3, 2); /* [batch, heads, numbers], float */
ATTN_DISPATCH_FA4_ARRAY(AttnFa4Counts, 3, 2);  /* [batch, heads, lines], int32 */
ATTN_DISPATCH_FA4_ARRAY(AttnFa4Indices, 4, 3); /* [batch, heads, lines, width], int32 */
ATTN_DISPATCH_FA4_ARRAY(AttnFa4Rows, 2, 1);    /* [batch, rows, (4)], int32 */
ATTN_DISPATCH_FA4_ARRAY(AttnFa4Bits, 4, 3);    /* [batch, heads, rows, words], uint32 */
ATTN_DISPATCH_FA4_ARRAY(AttnFa4Sinks, 2, 1);   /* [batch, heads], float */

/* An array that a score_mod reads, flat: any number of float or int32. */
typedef struct {
  void* data;
  int32_t shape[1];
} AttnFa4ModArray;

/* A set of kernels for one pair of head dims and one dtype. The arrays that `run` takes, in this
 * order (lists: partial counts, partial indices, full counts, full indices):
 *
 *   forward           q, k, v -> out, lse, lists, rows
 *   preprocess        out, out_grad -> products, lse -> lse2, query_sums, lse_grad
 *   backward          q, k, v, out_grad, lse2, products -> query_sums, dk, dv, lists, rows
 *   backward_grouped  the same, with key_sums and value_sums in place of dk and dv
 *   ..._bits          the same as the kernel without it, with bits in place of rows
 *   ..._sinks         the same as the kernel without it, with sinks after rows or bits
 *   query_grad        query_sums -> dq
 *   key_value_grad    key_sums -> dk (scaled) or value_sums -> dv (scale 1)
 *   tangent           q, k, v, their tangents, out, lse -> tangents of out and lse, lists, rows
 *   wide_forward      q, k, v -> out, lse
 *   wide_key_grads    q, k, v, out_grad, lse2, products -> dk, dv
 *   wide_query_grad   the same -> dq
 *   wide_..._causal   the same of a call that is causal from the bottom right, with at least as
 *                     many keys as queries
 *
 * products and lse2 are [batch, heads, T rounded up to backward_tile_m]; query_sums is that with
 * head_dim numbers for each row, and zeroed by preprocess; key_sums and value_sums are [batch,
 * key heads, S rounded up to backward_tile_n, with head_dim numbers each], and zero before.
 *
 * A mask is rows, of two intervals of keys (start, length, start, length) for each query row; or
 * bits, one for each key of each query row: that of key s is bit s % 32 of word s / 32. Bits past
 * the last key are 0.
 *
 * A sink is the score of one more key, whose value is 0, of all rows that see a key.
 *
 * The kernels of grouped heads, those with sinks, and tangents are missing (all null) unless the
 * set runs these. A set has either wide kernels or others. Wide ones take heads as AttnFa4Wide, of
 * any multiple of 8 columns up to head_dim, with the strides of their batch rows and rows, and any
 * number of query heads for each key head. Of them, lse2 is log2(e) * lse, and infinity past the
 * last row; products are 0 there.
 *
 * In a variant, the kernels that read a mask change scores before it, and take the arrays that the
 * change reads after all others. */
typedef struct {
  const char* name;
  const char* arch;  /* "sm90" */
  const char* dtype; /* "float16" or "bfloat16" */
  int32_t head_dim;
  int32_t head_dim_v;
  int32_t forward_tile_m;
  int32_t forward_tile_n;
  int32_t backward_tile_m;
  int32_t backward_tile_n;
  int32_t backward_subtiles;  /* tiles of query rows that an entry of a list stands for */
  int32_t tangent_tile_m;     /* 0 if there are no tangents */
  int32_t tangent_tile_n;
  const char* variant;        /* a digest of the change of scores; "" if they are not changed */
  const char* variant_name;   /* for people */
  const char* variant_arrays; /* a letter for each array that it reads: f for float, i for int32 */
  AttnFa4Kernel forward;
  AttnFa4Kernel forward_bits;
  AttnFa4Kernel forward_sinks;
  AttnFa4Kernel forward_bits_sinks;
  AttnFa4Kernel preprocess;
  AttnFa4Kernel backward;
  AttnFa4Kernel backward_bits;
  AttnFa4Kernel query_grad;
  AttnFa4Kernel backward_grouped;
  AttnFa4Kernel backward_bits_grouped;
  AttnFa4Kernel key_value_grad;
  AttnFa4Kernel tangent;
  AttnFa4Kernel tangent_bits;
  AttnFa4Kernel wide_forward;
  AttnFa4Kernel wide_forward_causal;
  AttnFa4Kernel wide_key_grads;
  AttnFa4Kernel wide_key_grads_causal;
  AttnFa4Kernel wide_query_grad;
  AttnFa4Kernel wide_query_grad_causal;
} AttnFa4Set;

typedef struct {
  int32_t interface; /* ATTN_DISPATCH_FA4_INTERFACE, first whatever the interface is */
  int32_t count;
  const AttnFa4Set* sets;
  const char* versions; /* of the packages that the kernels were compiled with */
  AttnFa4Driver* driver;
} AttnFa4Library;

typedef const AttnFa4Library* AttnFa4Get(void);

#ifdef __cplusplus
}
#endif
