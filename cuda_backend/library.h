// The cuDNN library of this process: found once, named by Python, shared with JAX.
#pragma once

#include <cstdint>
#include <string>

#include "status.h"

struct cudnnContext;
typedef struct cudnnContext* cudnnHandle_t;
typedef struct CUstream_st* cudaStream_t;

namespace attn_dispatch {

// Tables by device have this many places.
inline constexpr int32_t kMaxDevices = 64;

// An error for a device ordinal that such a table has no place for.
Status check_ordinal(int32_t device_ordinal);

// Whether the CUDA driver's own library can be loaded here. Loads nothing else.
bool has_driver();

// Loads libcudnn.so.9 from `path` (a name or a path), which takes a CUDA driver library: the real
// one or, only if the caller allows it, the stand-ins (stand_ins/) with which cuDNN can plan but
// not run. They have the names of the real libraries and stay for the life of the process, so only
// a process that does nothing but plan may allow them. The first success is final: one process
// speaks to one cuDNN. Returns its version, 91900 for 9.19.0.
Result<int64_t> load_cudnn(const std::string& path, bool allow_stand_ins);

// The version of the loaded library, 0 before load_cudnn.
int64_t cudnn_version();

// The file it was loaded from, whatever name it was asked for by; empty before load_cudnn.
std::string cudnn_path();

// Whether the driver in use is the stand-in, so that nothing can run here.
bool driver_is_stand_in();

// A handle for the calling thread on this device, made on first use and given back when the thread
// ends; bound to `stream` on return. Never call it first inside a stream capture.
Result<cudnnHandle_t> thread_handle(int32_t device_ordinal, cudaStream_t stream);

// A function of the CUDA driver library, null if it has none of this name. Valid after load_cudnn.
void* driver_symbol(const char* name);

template <typename Function>
Function* driver_symbol(const char* name) {
  return reinterpret_cast<Function*>(driver_symbol(name));
}

// Fills `bytes` at the device address with `value`, on the stream.
Status fill(void* address, uint8_t value, size_t bytes, cudaStream_t stream);

// Copies `bytes` from one device address to another, on the stream.
Status copy(void* to, const void* from, size_t bytes, cudaStream_t stream);

}  // namespace attn_dispatch
