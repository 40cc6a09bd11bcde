/* The part of libattn_dispatch_fa4.so that is not compiled kernels: the table of sets, and the
 * functions of the driver under the names that the kernels' host functions call. sets.inc, which
 * build-fa4 writes, has a line SET(...) for each set and VERSIONS. */
#include "fa4_library.h"

static AttnFa4Driver driver;

int32_t _cudaLibraryLoadData(void** library, const void* code, void* jit_options, void** jit_values,
                             uint32_t jit_count, void* options, void** values, uint32_t count) {
  return driver.load_library(library, code, jit_options, jit_values, jit_count, options, values,
                             count);
}
int32_t _cudaLibraryGetKernel(void** kernel, void* library, const char* name) {
  return driver.get_kernel(kernel, library, name);
}
int32_t _cudaGetDevice(int32_t* device) { return driver.get_device(device); }
int32_t _cudaDeviceGetAttribute(int32_t* value, int32_t attribute, int32_t device) {
  return driver.get_device_attribute(value, attribute, device);
}
int32_t _cuKernelGetAttribute(int32_t* value, int32_t attribute, void* kernel, int32_t device) {
  return driver.get_kernel_attribute(value, attribute, kernel, device);
}
int32_t _cudaKernelSetAttributeForDevice(void* kernel, int32_t attribute, int32_t value,
                                         int32_t device) {
  return driver.set_kernel_attribute(kernel, attribute, value, device);
}
int32_t _cudaFuncSetAttribute(void* kernel, int32_t attribute, int32_t value) {
  int32_t device = 0;
  const int32_t result = driver.get_device(&device);
  return result ? result : driver.set_kernel_attribute(kernel, attribute, value, device);
}
int32_t _cudaLaunchKernelEx(const void* config, void* kernel, void** arguments) {
  return driver.launch(config, kernel, arguments);
}

/* Declares the host functions of a kernel. The symbol of `run` is long, and contains the types of
 * the arguments. */
#define KERNEL(name, run)                                                            \
  void name##_load(void**) __asm__("_mlir_" #name "_cuda_init");                     \
  void name##_load_on_device(void**) __asm__("_mlir_" #name "_cuda_load_to_device"); \
  void name##_run(void**, int32_t) __asm__(run);
#define NO_KERNEL(name)
#define SET(name, arch, dtype, head_dim, head_dim_v, tiles, variant, kernels) kernels
#include "sets.inc"
#undef KERNEL
#undef NO_KERNEL
#undef SET

#define KERNEL(name, run) {name##_load, name##_load_on_device, name##_run},
#define NO_KERNEL(name) {0, 0, 0},
#define TILES(...) __VA_ARGS__
#define VARIANT(...) __VA_ARGS__
#define SET(name, arch, dtype, head_dim, head_dim_v, tiles, variant, kernels) \
  {name, arch, dtype, head_dim, head_dim_v, tiles, variant, kernels},
static const AttnFa4Set sets[] = {
#include "sets.inc"
};

static const AttnFa4Library library = {ATTN_DISPATCH_FA4_INTERFACE, sizeof sets / sizeof sets[0],
                                       sets, VERSIONS, &driver};

__attribute__((visibility("default"))) const AttnFa4Library* attn_dispatch_fa4_library(void) {
  return &library;
}
