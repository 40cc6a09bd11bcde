// Answers AITER's questions about its environment, whose usual answers are wrong in a process with
// GPUs of several architectures. This file is part of every library of AITER's, and the linker
// sends the calls here
// (--wrap in dispatch/attn_dispatch_tools/build_aiter/ninja.py).
#include "aiter_environment.h"

#include <hip/hip_runtime_api.h>

#include <cstring>
#include <stdexcept>
#include <string>

// hipGetDeviceProperties is a macro: the function's name depends on the version of HIP.
#define ATTN_JOINED(prefix, name) prefix##name
#define ATTN_NAMED(prefix, name) ATTN_JOINED(prefix, name)
#define ATTN_REAL_PROPERTIES ATTN_NAMED(__real_, hipGetDeviceProperties)
#define ATTN_WRAPPED_PROPERTIES ATTN_NAMED(__wrap_, hipGetDeviceProperties)

namespace {

void ThrowIf(hipError_t error, const std::string& what) {
  if (error == hipSuccess) return;
  throw std::runtime_error(what + " failed with \"" + hipGetErrorString(error) + "\"");
}

}  // namespace

extern "C" {

char* __real_getenv(const char* name);
hipError_t ATTN_REAL_PROPERTIES(hipDeviceProp_t* properties, int device);
hipError_t __real_hipModuleLoad(hipModule_t*, const char*);
hipError_t __real_hipModuleGetFunction(hipFunction_t*, hipModule_t, const char*);
hipError_t __real_hipModuleLaunchKernel(hipFunction_t, unsigned, unsigned, unsigned, unsigned,
                                        unsigned, unsigned, unsigned, hipStream_t, void**, void**);

// AITER loads its kernels from the folder $AITER_ASM_DIR. Here that is the folder of this library,
// whatever another package or an `import aiter` has set. Setting the variable instead would change
// the environment of everything else in the process, and of AITER for another architecture.
// $AITER_LOG_LEVEL is quieter unless it is set: AITER would print a line for each kernel that it
// loads, and for each question whether it has one.
char* __wrap_getenv(const char* name) {
  if (std::strcmp(name, "AITER_LOG_LEVEL") == 0) {
    static char quiet[] = "ERROR";
    char* level = __real_getenv(name);
    return level ? level : quiet;
  }
  if (std::strcmp(name, "AITER_ASM_DIR") != 0) return __real_getenv(name);
  const std::string& folder = attn_dispatch::aiter_adapter::AsmVariable();
  return folder.empty() ? nullptr : const_cast<char*>(folder.c_str());
}

// AITER asks for the architecture of device 0, whichever device is current (get_gpu_arch).
hipError_t ATTN_WRAPPED_PROPERTIES(hipDeviceProp_t* properties, int device) {
  int current = 0;
  if (device == 0 && hipGetDevice(&current) == hipSuccess) device = current;
  return ATTN_REAL_PROPERTIES(properties, device);
}

// If one of these three fails, AITER ends the process. It passes exceptions on, and finds the
// kernel again in the next call.
hipError_t __wrap_hipModuleLoad(hipModule_t* module, const char* file) {
  ThrowIf(__real_hipModuleLoad(module, file), std::string("loading the ASM kernel ") + file);
  return hipSuccess;
}

hipError_t __wrap_hipModuleGetFunction(hipFunction_t* function, hipModule_t module,
                                       const char* name) {
  ThrowIf(__real_hipModuleGetFunction(function, module, name),
          std::string("finding the ASM kernel ") + name + " in its file");
  return hipSuccess;
}

hipError_t __wrap_hipModuleLaunchKernel(hipFunction_t function, unsigned grid_x, unsigned grid_y,
                                        unsigned grid_z, unsigned block_x, unsigned block_y,
                                        unsigned block_z, unsigned shared_bytes, hipStream_t stream,
                                        void** arguments, void** extra) {
  ThrowIf(__real_hipModuleLaunchKernel(function, grid_x, grid_y, grid_z, block_x, block_y, block_z,
                                       shared_bytes, stream, arguments, extra),
          "the launch of a kernel");
  return hipSuccess;
}

}  // extern "C"
