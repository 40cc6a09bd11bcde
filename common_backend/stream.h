// The type by which a handler asks XLA for its stream, a cudaStream_t or hipStream_t. Tests run the
// handlers on a CPU, where XLA has no streams.
#pragma once

#include <optional>

#include "xla/ffi/api/ffi.h"

namespace attn_dispatch {

#ifdef ATTN_DISPATCH_EMULATED
template <typename Stream>
struct NoStream {};
template <typename Stream>
using StreamContext = NoStream<Stream>;
#else
template <typename Stream>
using StreamContext = xla::ffi::PlatformStream<Stream>;
#endif

}  // namespace attn_dispatch

#ifdef ATTN_DISPATCH_EMULATED
template <typename Stream>
struct xla::ffi::CtxDecoding<attn_dispatch::NoStream<Stream>> {
  using Type = Stream;
  static std::optional<Type> Decode(const XLA_FFI_Api*, XLA_FFI_ExecutionContext*,
                                    DiagnosticEngine&) {
    return nullptr;
  }
};
#endif
