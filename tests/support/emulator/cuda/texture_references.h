// HIP 5's headers for NVIDIA GPUs call what CUDA 12 removed, in inline functions that nobody here
// uses. Force-included before them.
#pragma once

#include <cuda_runtime.h>

template <typename... Arguments>
inline cudaError_t cudaBindTexture(Arguments...) {
  return cudaErrorNotSupported;
}

template <typename... Arguments>
inline cudaError_t cudaBindTexture2D(Arguments...) {
  return cudaErrorNotSupported;
}

inline cudaError_t cudaGetTextureAlignmentOffset(size_t*, const struct textureReference*) {
  return cudaErrorNotSupported;
}
