// The HIP runtime that AITER's host code runs on where there is no GPU: it has one GPU of the kind
// it is told, and writes down what it is asked to launch.
#include <hip/hip_runtime_api.h>
#include <unistd.h>

#include <cstring>
#include <string>
#include <utility>

#include "record.h"

namespace {

std::string arch = "gfx942";
int compute_units = 304;
int current_device = 0;
hipError_t next_error = hipSuccess;
std::string records;

}  // namespace

namespace judge {

float Record(const std::string& line) {
  records += line + "\n";
  return 0;
}

float RecordLiteral(const char* line) { return Record(line); }

}  // namespace judge

extern "C" {

void judge_set_gpu(const char* name, int units) {
  arch = name;
  compute_units = units;
}

void judge_set_device(int device) { current_device = device; }

// What hipGetLastError says the next time.
void judge_set_error(int error) { next_error = static_cast<hipError_t>(error); }

// What was recorded since the last call.
const char* judge_take_records() {
  static std::string taken;
  taken = std::move(records);
  records.clear();
  return taken.c_str();
}

hipError_t hipGetDeviceCount(int* count) {
  *count = 1;
  return hipSuccess;
}

hipError_t hipGetDevice(int* device) {
  *device = current_device;
  return hipSuccess;
}

hipError_t hipGetDeviceProperties(hipDeviceProp_t* properties, int) {
  std::memset(properties, 0, sizeof *properties);
  // As ROCm names it.
  std::strcpy(properties->gcnArchName, (arch + ":sramecc+:xnack-").c_str());
  properties->multiProcessorCount = compute_units;
  return hipSuccess;
}

hipError_t hipDeviceGetAttribute(int* value, hipDeviceAttribute_t attribute, int) {
  if (attribute != hipDeviceAttributeMultiprocessorCount) return hipErrorInvalidValue;
  *value = compute_units;
  return hipSuccess;
}

const char* hipGetErrorString(hipError_t) { return "an error of the fake HIP"; }

hipError_t hipGetLastError() { return std::exchange(next_error, hipSuccess); }

hipError_t hipPeekAtLastError() { return hipSuccess; }

hipError_t hipModuleLoad(hipModule_t* module, const char* file) {
  if (access(file, R_OK) != 0) judge::Record(std::string("missing ") + file);
  *module = reinterpret_cast<hipModule_t>(strdup(file));
  return hipSuccess;
}

hipError_t hipModuleUnload(hipModule_t) { return hipSuccess; }

// AITER keeps functions for good, so they are never freed here.
hipError_t hipModuleGetFunction(hipFunction_t* function, hipModule_t module, const char* name) {
  const std::string text = std::string(name) + " " + reinterpret_cast<const char*>(module);
  *function = reinterpret_cast<hipFunction_t>(strdup(text.c_str()));
  return hipSuccess;
}

hipError_t hipModuleLaunchKernel(hipFunction_t function, unsigned, unsigned, unsigned, unsigned,
                                 unsigned, unsigned, unsigned, hipStream_t, void**, void**) {
  judge::Record(std::string("asm ") + reinterpret_cast<const char*>(function));
  return hipSuccess;
}

// AITER times nothing here, but its code could.
hipError_t hipEventCreate(hipEvent_t*) { return hipErrorNotSupported; }
hipError_t hipEventDestroy(hipEvent_t) { return hipErrorNotSupported; }
hipError_t hipEventRecord(hipEvent_t, hipStream_t) { return hipErrorNotSupported; }
hipError_t hipEventSynchronize(hipEvent_t) { return hipErrorNotSupported; }
hipError_t hipEventElapsedTime(float*, hipEvent_t, hipEvent_t) { return hipErrorNotSupported; }
hipError_t hipStreamSynchronize(hipStream_t) { return hipErrorNotSupported; }
hipError_t hipDeviceSynchronize() { return hipErrorNotSupported; }

}  // extern "C"
