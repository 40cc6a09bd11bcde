// A HIP runtime for AITER's host code on machines without a GPU. It reports the GPUs that a test
// sets, and records the kernels that AITER launches.
#include "fake_hip.h"

#include <hip/hip_runtime_api.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "record.h"

using fake_hip::Function;
using fake_hip::Module;

namespace {

struct Gpu {
  std::string arch;
  int compute_units;
};

std::mutex mutex;
Gpu any_gpu{"gfx942", 304};
std::map<int, Gpu> gpus;  // by device, where they differ
std::map<std::string, std::string> folders;
std::string records;
std::string launches;
int hip_version = 7;
int launch_error = hipSuccess;
std::string failing;   // the name of a function that must fail once,
int calls_before = 0;  // after this many more calls of it

// HIP keeps these for each host thread.
thread_local int current_device = 0;
thread_local hipError_t last_error = hipSuccess;

const Gpu& gpu(int device) {
  const auto found = gpus.find(device);
  return found == gpus.end() ? any_gpu : found->second;
}

// Up to HIP 6 the last error is the result of the last call, which may be a success; since HIP 7 it
// is the last failure.
hipError_t returned(hipError_t error) {
  if (hip_version < 7 || error != hipSuccess) last_error = error;
  return error;
}

bool fails(const char* name) {
  std::lock_guard<std::mutex> lock(mutex);
  if (failing != name || calls_before-- > 0) return false;
  failing.clear();
  return true;
}

}  // namespace

namespace record {

float Record(const std::string& line) {
  std::lock_guard<std::mutex> lock(mutex);
  records += line + "\n";
  // CK checks the last error after each kernel, and launches nothing after this.
  if (launch_error != hipSuccess) {
    last_error = static_cast<hipError_t>(std::exchange(launch_error, hipSuccess));
  }
  return 0;
}

float RecordLiteral(const char* line) { return Record(line); }

}  // namespace record

const std::string& fake_hip::FolderOfDevice() { return folders[gpu(current_device).arch]; }

extern "C" {

void fake_hip_set_gpu(const char* name, int units) {
  any_gpu = {name, units};
  gpus.clear();
}

void fake_hip_set_gpu_of(int device, const char* name, int units) { gpus[device] = {name, units}; }

void fake_hip_set_asm_folder(const char* arch, const char* folder) { folders[arch] = folder; }

void fake_hip_set_device(int device) { current_device = device; }

void fake_hip_set_hip_version(int version) { hip_version = version; }

// Sets and returns this thread's last error.
void fake_hip_set_error(int error) { last_error = static_cast<hipError_t>(error); }
int fake_hip_last_error() { return last_error; }

void fake_hip_fail_call(const char* name, int after) {
  failing = name;
  calls_before = after;
}

// Makes the launch of the next kernel fail.
void fake_hip_set_launch_error(int error) { launch_error = error; }

// Returns and clears the record.
const char* fake_hip_take_records() {
  static std::string taken;
  taken = std::move(records);
  records.clear();
  return taken.c_str();
}

// Returns and clears a line for each launch of an ASM kernel: its grid, its block, its arguments.
const char* fake_hip_take_launches() {
  static std::string taken;
  taken = std::exchange(launches, "");
  return taken.c_str();
}

hipError_t hipGetDeviceCount(int* count) {
  if (fails("hipGetDeviceCount")) return returned(hipErrorNoDevice);
  *count = 8;
  return returned(hipSuccess);
}

hipError_t hipGetDevice(int* device) {
  if (fails("hipGetDevice")) return returned(hipErrorInitializationError);
  *device = current_device;
  return returned(hipSuccess);
}

hipError_t hipSetDevice(int device) {
  if (fails("hipSetDevice")) return returned(hipErrorOutOfMemory);
  current_device = device;
  return returned(hipSuccess);
}

hipError_t hipGetDeviceProperties(hipDeviceProp_t* properties, int device) {
  if (fails("hipGetDeviceProperties")) return returned(hipErrorInitializationError);
  std::memset(properties, 0, sizeof *properties);
  // The name as ROCm writes it.
  std::strcpy(properties->gcnArchName, (gpu(device).arch + ":sramecc+:xnack-").c_str());
  properties->multiProcessorCount = gpu(device).compute_units;
  return returned(hipSuccess);
}

hipError_t hipDeviceGetAttribute(int* value, hipDeviceAttribute_t attribute, int device) {
  if (fails("hipDeviceGetAttribute")) return returned(hipErrorInitializationError);
  switch (static_cast<int>(attribute)) {
    case hipDeviceAttributeMultiprocessorCount:
      *value = gpu(device).compute_units;
      break;
    case hipDeviceAttributeMaxSharedMemoryPerBlock:
      *value = gpu(device).arch == "gfx950" ? 160 << 10 : 64 << 10;
      break;
    case fake_hip::kPciChipId:
      *value = gpu(device).compute_units == 80 ? 0x74a2 : 0x74a1;  // MI308X, MI300X
      break;
    default:
      return returned(hipErrorInvalidValue);
  }
  return returned(hipSuccess);
}

const char* hipGetErrorString(hipError_t) { return "an error of the fake HIP"; }

hipError_t hipGetLastError() { return std::exchange(last_error, hipSuccess); }

hipError_t hipPeekAtLastError() { return last_error; }

hipError_t hipModuleLoad(hipModule_t* module, const char* file) {
  if (access(file, R_OK) != 0) {
    record::Record(std::string("missing ") + file);
    return returned(hipErrorFileNotFound);
  }
  if (fails("hipModuleLoad")) return returned(hipErrorInvalidImage);
  *module = reinterpret_cast<hipModule_t>(new Module{file, current_device});
  return returned(hipSuccess);
}

hipError_t hipModuleUnload(hipModule_t) { return returned(hipSuccess); }

// AITER never frees functions, so they are leaked here.
hipError_t hipModuleGetFunction(hipFunction_t* function, hipModule_t module, const char* name) {
  if (fails("hipModuleGetFunction")) return returned(hipErrorNotFound);
  *function =
      reinterpret_cast<hipFunction_t>(new Function{name, reinterpret_cast<const Module*>(module)});
  return returned(hipSuccess);
}

hipError_t hipModuleLaunchKernel(hipFunction_t function, unsigned x, unsigned y, unsigned z,
                                 unsigned block_x, unsigned, unsigned, unsigned, hipStream_t,
                                 void**, void** extra) {
  if (fails("hipModuleLaunchKernel")) return returned(hipErrorLaunchFailure);
  launches += fake_hip::Describe({x, y, z, block_x}, extra);
  const auto* launched = reinterpret_cast<const Function*>(function);
  // HIP fails to launch a function of another device, and then AITER ends the process.
  // A function of a fat binary is on every device.
  const int device = launched->module->device;
  const bool is_here = device < 0 || device == current_device;
  record::Record((is_here ? "asm " : "of another device: ") + launched->name + " " +
                 launched->module->file);
  return returned(hipSuccess);
}

// AITER's code refers to these functions but does not call them here.
hipError_t hipEventCreate(hipEvent_t*) { return hipErrorNotSupported; }
hipError_t hipEventDestroy(hipEvent_t) { return hipErrorNotSupported; }
hipError_t hipEventRecord(hipEvent_t, hipStream_t) { return hipErrorNotSupported; }
hipError_t hipEventSynchronize(hipEvent_t) { return hipErrorNotSupported; }
hipError_t hipEventElapsedTime(float*, hipEvent_t, hipEvent_t) { return hipErrorNotSupported; }
hipError_t hipStreamSynchronize(hipStream_t) { return hipErrorNotSupported; }
hipError_t hipDeviceSynchronize() { return hipErrorNotSupported; }

}  // extern "C"
