// A Status as XLA reports it.
#pragma once

#include <string>
#include <string_view>

#include "status.h"
#include "xla/ffi/api/ffi.h"

namespace attn_dispatch {

// Success, or XLA's code for the failure and its message behind `prefix`.
inline xla::ffi::Error ffi_error(std::string_view prefix, const Status& status) {
  using xla::ffi::ErrorCode;
  const auto error = [&](ErrorCode code) {
    return xla::ffi::Error(code, std::string(prefix) + status.message);
  };
  switch (status.code) {
    case Code::kOk:
      return xla::ffi::Error::Success();
    case Code::kWrongCall:
      return error(ErrorCode::kInvalidArgument);
    case Code::kUnsupported:
      return error(ErrorCode::kUnimplemented);
    case Code::kLibrary:
      return error(ErrorCode::kFailedPrecondition);
    case Code::kFinalizeFailed:
    case Code::kDevice:
      break;
  }
  return error(ErrorCode::kInternal);
}

}  // namespace attn_dispatch
