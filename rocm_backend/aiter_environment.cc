// Answers AITER's questions about its environment, whose usual answers are wrong in a process with
// GPUs of several architectures. This file is part of every library of AITER's, and the linker
// sends the calls here
// (--wrap in dispatch/attn_dispatch_tools/build_aiter/ninja.py).
#include "aiter_environment.h"

#include <hip/hip_runtime_api.h>

#include <cstring>

// hipGetDeviceProperties is a macro: the function's name depends on the version of HIP.
#define ATTN_JOINED(prefix, name) prefix##name
#define ATTN_NAMED(prefix, name) ATTN_JOINED(prefix, name)
#define ATTN_REAL_PROPERTIES ATTN_NAMED(__real_, hipGetDeviceProperties)
#define ATTN_WRAPPED_PROPERTIES ATTN_NAMED(__wrap_, hipGetDeviceProperties)

extern "C" {

char* __real_getenv(const char* name);
hipError_t ATTN_REAL_PROPERTIES(hipDeviceProp_t* properties, int device);

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

}  // extern "C"
