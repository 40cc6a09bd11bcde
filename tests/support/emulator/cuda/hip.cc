// HIP's functions by CUDA's, for build.cuda_library(), which is built without HIP's headers.
#include <cuda_runtime.h>
#include <hip/hip_runtime_api.h>

#include <string>

#include "export.h"
#include "hooks.h"

namespace {

thread_local std::string last_message = "unknown error";
thread_local hipError_t last_error = hipSuccess;

hipError_t as_hip(cudaError_t error) {
  if (error == cudaSuccess) return hipSuccess;
  last_message = cudaGetErrorString(error);
  return last_error = hipErrorUnknown;
}

}  // namespace

ATTN_EXPORT hipError_t hipMemsetAsync(void* destination, int value, size_t bytes,
                                      hipStream_t stream) {
  if (attn_emulator::must_fail(ATTN_EMULATOR_MEMSET, last_message)) {
    return last_error = hipErrorUnknown;
  }
  if (bytes == 0) return hipSuccess;
  return as_hip(cudaMemsetAsync(destination, value, bytes, reinterpret_cast<cudaStream_t>(stream)));
}

ATTN_EXPORT hipError_t hipGetLastError(void) {
  const hipError_t error = last_error;
  last_error = hipSuccess;
  return error;
}

ATTN_EXPORT const char* hipGetErrorString(hipError_t error) {
  return error == hipSuccess ? "no error" : last_message.c_str();
}
