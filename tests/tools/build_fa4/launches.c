// Runs the host code of FlashAttention-4's first set of kernels, for one small call with grouped
// heads, on a driver that prints what is launched. A test builds it for other machines as well.
#include <stdio.h>

#include "fa4_library.h"

extern const AttnFa4Library* attn_dispatch_fa4_library(void);

enum { kBatch = 2, kRows = 300, kKeys = 500, kHeads = 4, kKeyHeads = 2 };

static char code;
static const char* kernel_name = "";

static int32_t load_library(void** library, const void* image, void* a, void** b, uint32_t c,
                            void* d, void** e, uint32_t f) {
  *library = &code;
  return image == 0;
}
static int32_t get_kernel(void** kernel, void* library, const char* name) {
  kernel_name = name;
  *kernel = &kernel_name;
  return library != &code;
}
static int32_t get_device(int32_t* device) { return *device = 0; }
static int32_t get_device_attribute(int32_t* value, int32_t attribute, int32_t device) {
  return (*value = 1 << 20) && 0;
}
static int32_t get_kernel_attribute(int32_t* value, int32_t attribute, void* kernel,
                                    int32_t device) {
  return *value = 0;
}
static int32_t set_kernel_attribute(void* kernel, int32_t attribute, int32_t value,
                                    int32_t device) {
  return 0;
}
static int32_t launch(const void* config, void* kernel, void** arguments) {
  const uint32_t* x = config;  // grid, block
  printf(" grid %u %u %u block %u %u %u", x[0], x[1], x[2], x[3], x[4], x[5]);
  return 0;
}

static void run(const char* name, const AttnFa4Kernel* kernel, void** arrays, int count) {
  void *library = 0, **at = &library, *stream = 0;
  int32_t device = 0, result = 0;
  float scale = 0.125f;
  void* load[] = {&at, &result};
  void* load_on_device[] = {&at, &device, &result};
  void* arguments[20];
  int n = 0;
  while (n < count) arguments[n] = arrays[n], ++n;
  arguments[n++] = &scale;
  arguments[n++] = &stream;
  arguments[n++] = &result;
  printf("%s", name);
  kernel->load((void**)&load);
  printf(" load %d", result);
  kernel->load_on_device((void**)&load_on_device);
  printf(" prepare %d", result);
  kernel->run(arguments, n);
  printf(" result %d\n", result);
}

static AttnFa4Heads heads(int32_t rows, int32_t count, int64_t dim) {
  return (AttnFa4Heads){0, {kBatch, rows, count}, {rows * count * dim, count * dim}};
}
static AttnFa4Numbers numbers(int32_t count, int64_t of_head) {
  return (AttnFa4Numbers){0, {kBatch, count, of_head}, {count * of_head, of_head}};
}

int main(void) {
  const AttnFa4Library* found = attn_dispatch_fa4_library();
  *found->driver =
      (AttnFa4Driver){load_library,         get_kernel,           get_device, get_device_attribute,
                      get_kernel_attribute, set_kernel_attribute, launch};
  const AttnFa4Set* set = found->sets;
  printf("%d %s %s\n", found->interface, found->versions, set->name);
  AttnFa4Heads q = heads(kRows, kHeads, set->head_dim), k = heads(kKeys, kKeyHeads, set->head_dim);
  AttnFa4Heads v = heads(kKeys, kKeyHeads, set->head_dim_v);
  AttnFa4Heads out = heads(kRows, kHeads, set->head_dim_v);
  AttnFa4Numbers lse = numbers(kHeads, kRows);
  AttnFa4Counts counts = {0, {kBatch, kHeads, 4}, {0, 0}};
  AttnFa4Indices indices = {0, {kBatch, kHeads, 4, 4}, {0, 0, 4}};
  AttnFa4Rows rows = {0, {kBatch, kRows}, {kRows * 4}};
  void* forward[] = {&q, &k, &v, &out, &lse, &counts, &indices, &counts, &indices, &rows};
  run("forward", &set->forward, forward, 10);
  AttnFa4Sinks sinks = {0, {kBatch, kHeads}, {0}};
  void* with_sinks[11] = {[10] = &sinks};
  for (int i = 0; i < 10; ++i) with_sinks[i] = forward[i];
  if (set->forward_sinks.run) run("forward_sinks", &set->forward_sinks, with_sinks, 11);
  const int32_t padded =
      (kRows + set->backward_tile_m - 1) / set->backward_tile_m * set->backward_tile_m;
  AttnFa4Numbers lse2 = numbers(kHeads, padded), sums = numbers(kHeads, padded * set->head_dim);
  void* preprocess[] = {&out, &out, &lse2, &lse, &lse2, &sums, &lse};
  run("preprocess", &set->preprocess, preprocess, 7);
  void* query_grad[] = {&sums, &q};
  run("query_grad", &set->query_grad, query_grad, 2);
  return 0;
}
