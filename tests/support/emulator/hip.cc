// HIP's functions on a CPU, where calls have finished when they return.
#include <hip/hip_runtime_api.h>
#include <string.h>

#include <string>

#include "export.h"
#include "hooks.h"
#include "noted_buffers.h"

namespace {
thread_local std::string last_message = "unknown error";
thread_local hipError_t last_error = hipSuccess;
}  // namespace

ATTN_EXPORT hipError_t hipMemsetAsync(void* destination, int value, size_t bytes, hipStream_t) {
  if (attn_emulator::must_fail(ATTN_EMULATOR_MEMSET, last_message)) {
    return last_error = hipErrorUnknown;
  }
  if (bytes == 0) return hipSuccess;
  const int64_t left = attn_emulator::noted_bytes_from(destination);
  if (!destination || left < 0 || bytes > size_t(left)) return last_error = hipErrorInvalidValue;
  memset(destination, value, bytes);
  return hipSuccess;
}

ATTN_EXPORT hipError_t hipGetLastError(void) {
  const hipError_t error = last_error;
  last_error = hipSuccess;
  return error;
}

ATTN_EXPORT const char* hipGetErrorString(hipError_t error) {
  switch (error) {
    case hipSuccess:
      return "no error";
    case hipErrorInvalidValue:
      return "invalid argument";
    case hipErrorUnknown:
      break;
  }
  return last_message.c_str();
}
