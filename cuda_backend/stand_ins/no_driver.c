/* A stand-in for libcuda.so.1 in the planning process of machines without a driver. Loading modules and
 * kernels "succeeds" with a dummy handle, and everything else returns CUDA_ERROR_NO_DEVICE. That is
 * enough for cuDNN to compile and serialize a plan, and whatever looks for a device finds none. */
#include <stddef.h>

enum { kSuccess = 0, kNoDevice = 100, kPlannedForDriver = 13000, kMaxThreadsPerBlock = 0 };

static char dummy_handle[64];

#define GIVES_HANDLE(name)                                      \
  int name(void** out, void* a, void* b, void* c, void* d) {    \
    *out = dummy_handle;                                        \
    return kSuccess;                                            \
  }
#define SUCCEEDS(name) \
  int name(void) { return kSuccess; }
#define NO_DEVICE(name) \
  int name(void) { return kNoDevice; }

GIVES_HANDLE(cuLibraryLoadData)
GIVES_HANDLE(cuLibraryLoadFromFile)
GIVES_HANDLE(cuLibraryGetKernel)
GIVES_HANDLE(cuModuleLoadData)
GIVES_HANDLE(cuModuleLoadDataEx)
GIVES_HANDLE(cuModuleLoadFatBinary)
GIVES_HANDLE(cuModuleGetFunction)
GIVES_HANDLE(cuKernelGetFunction)
SUCCEEDS(cuKernelSetAttribute)
SUCCEEDS(cuFuncSetAttribute)
SUCCEEDS(cuLibraryUnload)
SUCCEEDS(cuModuleUnload)

int cuDriverGetVersion(int* version) {
  *version = kPlannedForDriver;
  return kSuccess;
}

int cuKernelGetAttribute(int* value, int attribute, void* kernel, int device) {
  *value = attribute == kMaxThreadsPerBlock ? 1024 : 0;
  return kSuccess;
}

int cuGetErrorString(int error, const char** text) {
  *text = "no CUDA driver on this machine";
  return kSuccess;
}

/* One NO_DEVICE(name) for every other function that cuda.h declares. */
#include "no_device_functions.inc"
