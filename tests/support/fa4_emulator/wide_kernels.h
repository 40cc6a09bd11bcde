/* The kernels of wide heads, for kernels.c: strides and columns are read from the arrays. */
typedef const AttnFa4Wide Wide;

#define IS_CAUSAL (KERNEL % 2 == 1)

static uint16_t* wide_head(Wide* x, int64_t b, int64_t row, int64_t n) {
  return (uint16_t*)x->data + b * x->strides[0] + row * x->strides[1] + n * x->strides[2];
}

/* The number of keys that a query sees, of a call with at least as many keys if it is causal. */
static int32_t seen(Wide* q, Wide* k, int32_t t) {
  return IS_CAUSAL ? t + 1 + k->shape[1] - q->shape[1] : k->shape[1];
}

#if KERNEL <= wide_forward_causal
enum { ARRAYS = 5 };
static void compute(void** arrays, float scale) {
  Wide *q = arrays[0], *k = arrays[1], *v = arrays[2], *out = arrays[3];
  Numbers* lse = arrays[4];
  const int32_t width = q->shape[3], group = q->shape[2] / k->shape[2];
  float* scores = malloc(sizeof(float) * k->shape[1]);
  for (int32_t b = 0; b < q->shape[0]; ++b)
    for (int32_t n = 0; n < q->shape[2]; ++n)
      for (int32_t t = 0; t < q->shape[1]; ++t) {
        float top = -INFINITY, total = 0, sum[HEAD_DIM] = {0};
        for (int32_t s = 0; s < seen(q, k, t); ++s) {
          const uint16_t* key = wide_head(k, b, s, n / group);
          scores[s] = scale * dot(wide_head(q, b, t, n), key, width);
          top = fmaxf(top, scores[s]);
        }
        for (int32_t s = 0; s < seen(q, k, t); ++s) {
          const float weight = expf(scores[s] - top);
          const uint16_t* value = wide_head(v, b, s, n / group);
          total += weight;
          for (int i = 0; i < width; ++i) sum[i] += weight * wide(value[i]);
        }
        for (int i = 0; i < width; ++i) wide_head(out, b, t, n)[i] = narrow(sum[i] / total);
        numbers(lse, b, n)[t] = top + logf(total);
      }
  free(scores);
}

#else
/* Adds the share of one pair to the gradients of its query, key and value. */
static void add_pair(void** arrays, float scale, int32_t b, int32_t n, int32_t t, int32_t s,
                     float* dq, float* dk, float* dv) {
  Wide *q = arrays[0], *k = arrays[1], *v = arrays[2], *out_grad = arrays[3];
  Numbers *lse2 = arrays[4], *products = arrays[5];
  const int32_t width = q->shape[3], group = q->shape[2] / k->shape[2];
  const uint16_t *query = wide_head(q, b, t, n), *key = wide_head(k, b, s, n / group);
  const uint16_t* grad = wide_head(out_grad, b, t, n);
  const float score = scale * dot(query, key, width);
  const float weight = exp2f((float)M_LOG2E * score - numbers(lse2, b, n)[t]);
  const float product = dot(grad, wide_head(v, b, s, n / group), width);
  const float change = scale * weight * (product - numbers(products, b, n)[t]);
  for (int i = 0; i < width; ++i) {
    dq[i] += change * wide(key[i]);
    dk[i] += change * wide(query[i]);
    dv[i] += weight * wide(grad[i]);
  }
}

static void write_row(uint16_t* row, const float* sum, int32_t width) {
  for (int i = 0; i < width; ++i) row[i] = narrow(sum[i]);
}

#if KERNEL <= wide_key_grads_causal
enum { ARRAYS = 8 };
static void compute(void** arrays, float scale) {
  Wide *q = arrays[0], *k = arrays[1], *key_grad = arrays[6], *value_grad = arrays[7];
  const int32_t width = q->shape[3], group = q->shape[2] / k->shape[2];
  for (int32_t b = 0; b < k->shape[0]; ++b)
    for (int32_t kv = 0; kv < k->shape[2]; ++kv)
      for (int32_t s = 0; s < k->shape[1]; ++s) {
        float dq[HEAD_DIM], dk[HEAD_DIM] = {0}, dv[HEAD_DIM] = {0};
        memset(dq, 0, sizeof dq);
        for (int32_t n = kv * group; n < (kv + 1) * group; ++n)
          for (int32_t t = 0; t < q->shape[1]; ++t)
            if (s < seen(q, k, t)) add_pair(arrays, scale, b, n, t, s, dq, dk, dv);
        write_row(wide_head(key_grad, b, s, kv), dk, width);
        write_row(wide_head(value_grad, b, s, kv), dv, width);
      }
}

#else
enum { ARRAYS = 7 };
static void compute(void** arrays, float scale) {
  Wide *q = arrays[0], *k = arrays[1], *query_grad_ = arrays[6];
  for (int32_t b = 0; b < q->shape[0]; ++b)
    for (int32_t n = 0; n < q->shape[2]; ++n)
      for (int32_t t = 0; t < q->shape[1]; ++t) {
        float dq[HEAD_DIM] = {0}, dk[HEAD_DIM], dv[HEAD_DIM];
        memset(dk, 0, sizeof dk);
        memset(dv, 0, sizeof dv);
        for (int32_t s = 0; s < seen(q, k, t); ++s) add_pair(arrays, scale, b, n, t, s, dq, dk, dv);
        write_row(wide_head(query_grad_, b, t, n), dq, q->shape[3]);
      }
}
#endif
#endif
