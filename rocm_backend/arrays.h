// The buffers of one execution, taken one after the other and checked by shape and dtype.
#pragma once

#include <initializer_list>
#include <string>
#include <vector>

#include "xla/ffi/api/ffi.h"

// The tests' emulator is told how large every buffer is, so that it can check each access.
#ifndef ATTN_DISPATCH_NOTE_BUFFER
#define ATTN_DISPATCH_NOTE_BUFFER(data, bytes) (void)0
#endif

namespace attn_dispatch {

using Dims = std::vector<int64_t>;

struct Array {
  void* data = nullptr;
  Dims dims;
  xla::ffi::DataType dtype = xla::ffi::DataType::INVALID;
  size_t bytes = 0;
};

// Takes operands and results in the order of the custom call. After the first mismatch `error()` is
// a sentence and what is taken is not to be used.
class Arrays {
 public:
  Arrays(const xla::ffi::RemainingArgs& operands, const xla::ffi::RemainingRets& results)
      : operands_(operands), results_(results) {}

  Array operand(const char* name) {
    if (next_operand_ >= operands_.size()) return missing(name);
    return taken(*operands_.get<xla::ffi::AnyBuffer>(next_operand_++));
  }

  Array result(const char* name) {
    if (next_result_ >= results_.size()) return missing(name);
    return taken(**results_.get<xla::ffi::AnyBuffer>(next_result_++));
  }

  Array operand(const char* name, xla::ffi::DataType dtype, const Dims& dims) {
    return checked(name, operand(name), dtype, dims);
  }

  Array result(const char* name, xla::ffi::DataType dtype, const Dims& dims) {
    return checked(name, result(name), dtype, dims);
  }

  // To be asked once all are taken.
  const std::string& error() {
    if (error_.empty() && (next_operand_ < operands_.size() || next_result_ < results_.size())) {
      error_ = "expected " + std::to_string(next_operand_) + " operands and " +
               std::to_string(next_result_) + " results, got " + std::to_string(operands_.size()) +
               " and " + std::to_string(results_.size());
    }
    return error_;
  }

  void fail(const std::string& sentence) {
    if (error_.empty()) error_ = sentence;
  }

 private:
  Array taken(const xla::ffi::AnyBuffer& buffer) {
    const auto dims = buffer.dimensions();
    Array array{buffer.untyped_data(), Dims(dims.begin(), dims.end()), buffer.element_type(),
                buffer.size_bytes()};
    ATTN_DISPATCH_NOTE_BUFFER(array.data, static_cast<int64_t>(array.bytes));
    return array;
  }

  Array checked(const char* name, Array array, xla::ffi::DataType dtype, const Dims& dims) {
    if (array.dtype != dtype) {
      fail(std::string(name) + ": expected dtype number " +
           std::to_string(static_cast<int>(dtype)) + ", got " +
           std::to_string(static_cast<int>(array.dtype)));
    } else if (array.dims != dims) {
      fail(std::string(name) + ": expected shape " + text(dims) + ", got " + text(array.dims));
    }
    return array;
  }

  Array missing(const char* name) {
    fail(std::string(name) + ": expected an array, and the call has no more");
    return {};
  }

  static std::string text(const Dims& dims) {
    std::string result;
    for (int64_t dim : dims) result += (result.empty() ? "" : ", ") + std::to_string(dim);
    return "[" + result + "]";
  }

  const xla::ffi::RemainingArgs& operands_;
  const xla::ffi::RemainingRets& results_;
  size_t next_operand_ = 0;
  size_t next_result_ = 0;
  std::string error_;
};

}  // namespace attn_dispatch
