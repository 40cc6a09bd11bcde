#include "arrays.h"

#include "buffers.h"
#include "wrong_value.h"

namespace attn_dispatch {
namespace {

int64_t bytes_of(ElementType type) {
  return type == ElementType::kFloat16 || type == ElementType::kBFloat16 ? 2 : 4;
}

}  // namespace

std::string to_text(ElementType type, const Shape& shape) {
  std::string text = type_name(type);
  text += " [";
  const char* separator = "";
  for (const int64_t extent : shape) {
    text += separator + std::to_string(extent);
    separator = ", ";
  }
  return text +
         (shape.end() - shape.begin() == static_cast<ptrdiff_t>(shape.size()) ? "]" : ", ...]");
}

int64_t product(const Shape& extents) {
  int64_t result = 1;
  for (const int64_t extent : extents) {
    if (extent < 0 || __builtin_mul_overflow(result, extent, &result) || result > kMostBytes) {
      return -1;
    }
  }
  return result;
}

Status check_array(const Array& array, const Expected& expected) {
  if (array.type != expected.type || array.shape != expected.shape) {
    return {Code::kWrongCall, std::string(expected.name) + ": expected " +
                                  to_text(expected.type, expected.shape) + ", got " +
                                  to_text(array.type, array.shape)};
  }
  const int64_t elements = product(expected.shape);
  if (elements < 0 || elements > kMostBytes / 4) {
    return {Code::kWrongCall, std::string(expected.name) + ": " +
                                  to_text(expected.type, expected.shape) +
                                  " is more than a process can address"};
  }
  if (const int64_t bytes = elements * bytes_of(expected.type); array.bytes != bytes) {
    return wrong_value(expected.name, std::to_string(bytes) + " bytes", array.bytes);
  }
  if (reinterpret_cast<uintptr_t>(array.data) % expected.alignment != 0) {
    return wrong_value(expected.name,
                       "an address that is a multiple of " + std::to_string(expected.alignment),
                       reinterpret_cast<uintptr_t>(array.data));
  }
  return {};
}

}  // namespace attn_dispatch
