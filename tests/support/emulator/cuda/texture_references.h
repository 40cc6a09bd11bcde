// Defines functions that CUDA 12 removed, because inline functions in HIP 5's headers for NVIDIA
// GPUs call them. Nobody here uses those. Force-included before the headers.
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
