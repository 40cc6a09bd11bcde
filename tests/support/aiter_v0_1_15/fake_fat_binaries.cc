// How AITER v0.1.15 and later give kernels to HIP: as fat binaries, which HIP loads on each device.
#include <elf.h>
#include <hip/hip_runtime_api.h>

#include <cstring>
#include <map>
#include <mutex>
#include <string_view>

#include "fake_hip.h"

namespace {

struct FatBinary {
  uint32_t magic, version;
  const void* binary;
};

std::mutex mutex;
std::map<const void*, fake_hip::Function*> functions;  // by the address that stands for them

std::string_view Contents(const void* binary) {
  const auto* elf = static_cast<const Elf64_Ehdr*>(binary);
  if (std::memcmp(elf->e_ident, ELFMAG, SELFMAG) != 0) return {};
  return {static_cast<const char*>(binary), elf->e_shoff + size_t{elf->e_shnum} * elf->e_shentsize};
}

// The architecture of a code object, by the low byte of the flags in its ELF header.
std::string ArchOf(const void* binary) {
  switch (static_cast<const Elf64_Ehdr*>(binary)->e_flags & 0xff) {
    case 0x4c:
      return "gfx942";
    case 0x4f:
      return "gfx950";
    default:
      return "another architecture";
  }
}

}  // namespace

extern "C" {

void* __hipRegisterFatBinary(const FatBinary* fat) noexcept { return new FatBinary(*fat); }

void __hipUnregisterFatBinary(void*) noexcept {}

// HIP knows a function only if the code object has it.
void __hipRegisterFunction(void* fat, const void* address, const char* name, const char*, int,
                           void*, void*, void*, void*, void*) noexcept {
  const void* binary = static_cast<const FatBinary*>(fat)->binary;
  const std::string_view contents = Contents(binary);
  if (contents.find(name) == contents.npos) return;
  std::lock_guard<std::mutex> lock(mutex);
  functions[address] =
      new fake_hip::Function{name, new fake_hip::Module{ArchOf(binary), /*device=*/-1}};
}

hipError_t hipGetFuncBySymbol(hipFunction_t* function, const void* address) {
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = functions.find(address);
  if (found == functions.end()) return hipErrorInvalidDeviceFunction;
  *function = reinterpret_cast<hipFunction_t>(found->second);
  return hipSuccess;
}

}  // extern "C"
