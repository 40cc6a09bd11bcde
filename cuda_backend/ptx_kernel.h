// A kernel in PTX, which the driver compiles for the device, so that building the library needs no
// CUDA compiler.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "library.h"
#include "status.h"

namespace attn_dispatch {

class PtxKernel {
 public:
  // `source` is PTX with an entry of this name; both must live as long as the kernel.
  constexpr PtxKernel(const char* source, const char* name) : source_(source), name_(name) {}

  // Loads the kernel on the current device. Must not be called inside a stream capture.
  Status load(int32_t device_ordinal);

  // Queues blocks_x * blocks_y blocks of `threads`, after loading the kernel if it is not loaded.
  Status launch(int32_t device_ordinal, unsigned blocks_x, unsigned blocks_y, unsigned threads,
                cudaStream_t stream, void** arguments);

 private:
  const char* const source_;
  const char* const name_;
  std::array<std::atomic<struct CUfunc_st*>, kMaxDevices> loaded_{};
};

}  // namespace attn_dispatch
