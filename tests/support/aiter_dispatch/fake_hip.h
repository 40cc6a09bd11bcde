// What the files of the fake HIP runtime share.
#pragma once

#include <array>
#include <string>

namespace fake_hip {

// hipDeviceAttributePciChipId, which HIP has since 6.2.
constexpr int kPciChipId = 10019;

struct Module {
  std::string file;
  int device;
};
struct Function {
  std::string name;
  const Module* module;
};

// The folder of ASM kernels that a test has set for the kind of the current device.
const std::string& FolderOfDevice();

// A line with a launch's grid, block and the bytes of its arguments.
std::string Describe(const std::array<unsigned, 4>& sizes, void** extra);

}  // namespace fake_hip
