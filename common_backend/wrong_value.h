// The sentence that refuses a value: its name, what was expected, and what it is.
#pragma once

#include <cstdint>
#include <sstream>
#include <string>
#include <string_view>
#include <type_traits>

#include "status.h"

namespace attn_dispatch {

// The first 80 characters of a text from outside, with '?' for those that no terminal shows.
inline std::string excerpt(std::string_view text) {
  constexpr size_t kMostCharacters = 80;
  std::string printable;
  for (const char c : text.substr(0, kMostCharacters)) printable += c >= ' ' && c <= '~' ? c : '?';
  return printable + (text.size() > kMostCharacters ? "..." : "");
}

inline std::string to_text(bool value) { return value ? "true" : "false"; }
inline std::string to_text(std::string_view value) { return '"' + excerpt(value) + '"'; }
inline std::string to_text(float value) {
  std::ostringstream out;
  out << value;  // std::to_string would make 0.000000 of 1e-40
  return out.str();
}
template <typename Integer, typename = std::enable_if_t<std::is_integral_v<Integer>>>
std::string to_text(Integer value) {
  return std::to_string(value);
}

template <typename T>
Status wrong_value(const std::string& name, const std::string& expected, const T& value) {
  return {Code::kWrongCall, name + ": expected " + expected + ", got " + to_text(value)};
}

}  // namespace attn_dispatch
