// The cuDNN library and the CUDA driver of this process. Python says which cuDNN to load: the one
// that JAX uses.
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

// Whether the real CUDA driver library can be loaded here. Loads nothing else.
bool has_driver();

// The file that load_cudnn would open for a name or path; empty if the loader finds none. Python
// judges it and its neighbours (devices/code_files.py) before load_cudnn opens them.
std::string cudnn_file(const std::string& name);

// Loads libcudnn.so.9 from `path` (a name or a path) and returns its version, 91900 for 9.19.0.
// cuDNN needs a CUDA driver library: the real one or, only if the caller allows it, the stand-ins
// (stand_ins/), with which cuDNN can plan but not run. Stand-ins have the names of the real
// libraries and stay for the life of the process, so only a process that does nothing but plan may
// allow them. The first success is final: a process uses one cuDNN.
Result<int64_t> load_cudnn(const std::string& path, bool allow_stand_ins);

// The version of the loaded library, 0 before load_cudnn.
int64_t cudnn_version();

// The file that cuDNN was loaded from, which need not be the requested name; empty before
// load_cudnn.
std::string cudnn_path();

// Whether the driver is the stand-in, so that nothing can run here.
bool driver_is_stand_in();

// The calling thread's handle on this device, bound to `stream`. It is made on first use, which
// must not be inside a stream capture, and given back when the thread ends.
Result<cudnnHandle_t> thread_handle(int32_t device_ordinal, cudaStream_t stream);

// A function of the CUDA driver library, or null if it has none of this name or is not loaded.
void* driver_symbol(const char* name);

template <typename Function>
Function* driver_symbol(const char* name) {
  return reinterpret_cast<Function*>(driver_symbol(name));
}

// Queues: fills `bytes` at the device address with `value`.
Status fill(void* address, uint8_t value, size_t bytes, cudaStream_t stream);

// Queues: copies `bytes` from one device address to another.
Status copy(void* to, const void* from, size_t bytes, cudaStream_t stream);

}  // namespace attn_dispatch
