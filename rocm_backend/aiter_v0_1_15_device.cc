// Keeps AITER, generation "v0.1.15", from ending the process or running a call wrongly.
#include <array>
#include <atomic>
#include <cstring>

#include "aiter_environment.h"
#include "aiter_v0_1_15.h"

namespace attn_dispatch::aiter_adapter {
namespace {

struct Refused {
  bool (*is)(const AttnAiterCall&);
  const char* sentence;
};

constexpr Refused kRefused[] = {
    {[](const AttnAiterCall& call) { return call.use_asm == 0; },
     "this build of AITER has ASM kernels alone, and no CK"},
    {[](const AttnAiterCall& call) { return call.seqlen_q || call.seqlen_k; },
     "AITER's ASM kernels take lengths as prefix sums"},
};

// One bit for each of the devices that have answered all questions before.
std::atomic<uint64_t> answered{0};

hipError_t Ask(int device, hipDeviceProp_t* properties) {
  int count = 0, value = 0;
  hipError_t error = hipGetDeviceCount(&count);
  if (error == hipSuccess) error = hipGetDeviceProperties(properties, device);
  for (hipDeviceAttribute_t attribute :
       {hipDeviceAttributePciChipId, hipDeviceAttributeMaxSharedMemoryPerBlock}) {
    if (error == hipSuccess) error = hipDeviceGetAttribute(&value, attribute, device);
  }
  return error;
}

}  // namespace

std::optional<std::string> AsmRefusal(const AttnAiterCall& call) {
  for (const Refused& refused : kRefused) {
    if (refused.is(call)) return std::string(refused.sentence) + ": " + Describe(call);
  }
  return {};
}

std::optional<std::string> DeviceError() {
  int device = 0;
  hipError_t error = hipGetDevice(&device);
  const uint64_t bit = device >= 0 && device < 64 ? uint64_t{1} << device : 0;
  if (error == hipSuccess && (answered & bit)) return {};
  hipDeviceProp_t properties;
  if (error == hipSuccess) error = Ask(device, &properties);
  if (error != hipSuccess) {
    return std::string("HIP cannot describe the current device: ") + hipGetErrorString(error);
  }
  const std::string arch(properties.gcnArchName, std::strcspn(properties.gcnArchName, ":"));
  // AITER finds a kernel that it has loaded by its name alone, which kernels of several
  // architectures share. So each architecture has a library of its own.
  if (arch != ArchOfBuild()) {
    return std::string("this AITER is built for ") + ArchOfBuild() +
           ", and the current device is " + arch;
  }
  answered |= bit;
  return {};
}

}  // namespace attn_dispatch::aiter_adapter
