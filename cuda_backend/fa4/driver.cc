#include "driver.h"

#include "library.h"

namespace attn_dispatch {
namespace {

constexpr int32_t kNotSupported = 801;  // CUDA_ERROR_NOT_SUPPORTED

thread_local int32_t first_failure = 0;

int32_t noted(int32_t result) {
  if (result != 0 && first_failure == 0) first_failure = result;
  return result;
}

// Calls a function of the driver. A driver that lacks it is too old.
template <typename... Parameters>
int32_t call(int32_t (*function)(Parameters...), Parameters... arguments) {
  return noted(function ? function(arguments...) : kNotSupported);
}

#define DRIVER_FUNCTION(type, name) static auto* const function = driver_symbol<type>(name)

int32_t load_library(void** library, const void* code, void* jit_options, void** jit_values,
                     uint32_t jit_count, void* options, void** values, uint32_t count) {
  using Load = int32_t(void**, const void*, void*, void**, uint32_t, void*, void**, uint32_t);
  DRIVER_FUNCTION(Load, "cuLibraryLoadData");
  return call(function, library, code, jit_options, jit_values, jit_count, options, values, count);
}

int32_t get_kernel(void** kernel, void* library, const char* name) {
  using Get = int32_t(void**, void*, const char*);
  DRIVER_FUNCTION(Get, "cuLibraryGetKernel");
  return call(function, kernel, library, name);
}

int32_t get_device(int32_t* device) {
  DRIVER_FUNCTION(int32_t(int32_t*), "cuCtxGetDevice");
  return call(function, device);
}

int32_t get_device_attribute(int32_t* value, int32_t attribute, int32_t device) {
  using Get = int32_t(int32_t*, int32_t, int32_t);
  DRIVER_FUNCTION(Get, "cuDeviceGetAttribute");
  return call(function, value, attribute, device);
}

int32_t get_kernel_attribute(int32_t* value, int32_t attribute, void* kernel, int32_t device) {
  using Get = int32_t(int32_t*, int32_t, void*, int32_t);
  DRIVER_FUNCTION(Get, "cuKernelGetAttribute");
  return call(function, value, attribute, kernel, device);
}

int32_t set_kernel_attribute(void* kernel, int32_t attribute, int32_t value, int32_t device) {
  using Set = int32_t(int32_t, int32_t, void*, int32_t);
  DRIVER_FUNCTION(Set, "cuKernelSetAttribute");
  return call(function, attribute, value, kernel, device);
}

// The kernels' launch configuration is that of CUDA's runtime. The driver's has the same layout but
// for 32 instead of 64 bits of shared memory's size, and takes a kernel for a function.
int32_t launch(const void* config, void* kernel, void** arguments) {
  using Launch = int32_t(const void*, void*, void**, void**);
  DRIVER_FUNCTION(Launch, "cuLaunchKernelEx");
  return call<const void*, void*, void**, void**>(function, config, kernel, arguments, nullptr);
}

#undef DRIVER_FUNCTION

}  // namespace

AttnFa4Driver fa4_driver() {
  return {load_library,         get_kernel,           get_device, get_device_attribute,
          get_kernel_attribute, set_kernel_attribute, launch};
}

void forget_driver_failure() { first_failure = 0; }

int32_t driver_failure() { return first_failure; }

std::string driver_error_name(int32_t result) {
  static auto* const name_of = driver_symbol<int32_t(int32_t, const char**)>("cuGetErrorName");
  const char* name = nullptr;
  if (name_of && name_of(result, &name) == 0 && name) return name;
  return "status " + std::to_string(result);
}

}  // namespace attn_dispatch
