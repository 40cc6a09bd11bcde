// The few HIP calls that rocm_backend makes, declared as HIP declares them, so that it builds and
// runs where no ROCm is installed. hip.cc gives them a CPU's meaning, cuda/hip.cc CUDA's.
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
