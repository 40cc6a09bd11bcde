// The type by which a handler asks XLA for its stream. Tests run the handlers on a CPU, where XLA
// has no streams.
#pragma once

#include "library.h"
#include "xla/ffi/api/ffi.h"

namespace attn_dispatch {

#ifdef ATTN_DISPATCH_EMULATED
struct NoStream {};
using StreamContext = NoStream;
#else
using StreamContext = xla::ffi::PlatformStream<cudaStream_t>;
#endif

}  // namespace attn_dispatch

#ifdef ATTN_DISPATCH_EMULATED
template <>
struct xla::ffi::CtxDecoding<attn_dispatch::NoStream> {
  using Type = cudaStream_t;
  static std::optional<Type> Decode(const XLA_FFI_Api*, XLA_FFI_ExecutionContext*,
                                    DiagnosticEngine&) {
    return nullptr;
  }
};
#endif
