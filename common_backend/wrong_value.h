// How a refusal of an attribute reads: its name, what was expected, and its value.
#pragma once

#include <cstdint>
#include <sstream>
#include <string>
#include <string_view>

#include "status.h"

namespace attn_dispatch {

inline std::string shown(bool value) { return value ? "true" : "false"; }
inline std::string shown(int64_t value) { return std::to_string(value); }
inline std::string shown(float value) {
  std::ostringstream out;
  out << value;
  return out.str();
}

// The beginning of a text from outside, without what no terminal shows.
inline std::string beginning(std::string_view text) {
  constexpr size_t kMost = 80;
  std::string shown;
  for (const char c : text.substr(0, kMost)) shown += c >= ' ' && c <= '~' ? c : '?';
  return shown + (text.size() > kMost ? "..." : "");
}

inline std::string shown(const std::string& value) { return '"' + beginning(value) + '"'; }

template <typename T>
Status wrong_value(const std::string& name, const std::string& expected, const T& value) {
  return {Code::kWrongCall, name + ": expected " + expected + ", got " + shown(value)};
}

}  // namespace attn_dispatch
