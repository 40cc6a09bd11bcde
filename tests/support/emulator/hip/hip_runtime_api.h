// The few functions of HIP that rocm_backend calls, declared as HIP declares them, so that it
// builds and runs without ROCm. hip.cc implements them on a CPU, cuda/hip.cc with CUDA.
#pragma once

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum hipError_t {
  hipSuccess = 0,
  hipErrorInvalidValue = 1,
  hipErrorUnknown = 999,
} hipError_t;

typedef struct ihipStream_t* hipStream_t;

hipError_t hipMemsetAsync(void* destination, int value, size_t bytes, hipStream_t stream);
hipError_t hipGetLastError(void);
const char* hipGetErrorString(hipError_t error);

#ifdef __cplusplus
}
#endif
