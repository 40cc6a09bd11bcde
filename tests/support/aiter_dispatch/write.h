// Writes a named argument as one line of the record.
#pragma once

#include <cstdint>
#include <string>

#include "record.h"

namespace record {

inline std::string Text(const void* pointer) {
  return std::to_string(reinterpret_cast<uintptr_t>(pointer));
}
inline std::string Text(double value) { return std::to_string(value); }
inline std::string Text(int value) { return std::to_string(value); }
inline std::string Text(bool value) { return value ? "1" : "0"; }
inline std::string Text(uint64_t value) { return std::to_string(value); }

template <typename T>
void Write(const char* name, T value) {
  Record(std::string(name) + " " + Text(value));
}

}  // namespace record
