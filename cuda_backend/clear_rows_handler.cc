// The custom call attn_dispatch_clear_rows. It clears padding rows (clear_rows.h) of results that
// other libraries' kernels wrote, in place: XLA would read and write the whole array.
//
// Operands: rows, of any shape; flags, one u8 per row. The result is rows again, in the same
// buffer. It is another buffer, to which rows are copied, if XLA made the operand a slice of a
// larger array (in a scan).
#include "clear_rows.h"
#include "ffi_error.h"
#include "handlers.h"
#include "library.h"
#include "status.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace attn_dispatch {
namespace {

ffi::Error to_ffi(const Status& status) { return ffi_error("attn_dispatch_clear_rows: ", status); }

ffi::Error wrong_call(const std::string& message) { return to_ffi({Code::kWrongCall, message}); }

// Loads the kernel before any command buffer is captured.
ffi::Error Load(int32_t ordinal, ffi::RemainingArgs, ffi::RemainingRets) {
  // The driver is not loaded yet if cuDNN was not used.
  if (!has_driver()) return to_ffi({Code::kLibrary, "no CUDA driver library can be loaded"});
  return to_ffi(load_clear_rows(ordinal));
}

ffi::Error Clear(cudaStream_t stream, int32_t ordinal, ffi::AnyBuffer rows,
                 ffi::Buffer<ffi::U8> flags, ffi::Result<ffi::AnyBuffer> cleared) {
  const auto count = static_cast<int64_t>(flags.element_count());
  const auto bytes = static_cast<int64_t>(rows.size_bytes());
  if (const auto result = static_cast<int64_t>(cleared->size_bytes()); result != bytes) {
    return wrong_call("expected a result of " + std::to_string(bytes) +
                      " bytes, as the rows, got " + std::to_string(result));
  }
  if (bytes == 0) return ffi::Error::Success();
  if (count == 0 || bytes % count != 0 || bytes / count % kRowMultiple != 0) {
    return wrong_call("expected " + std::to_string(count) +
                      " rows, one per flag, of a multiple of " + std::to_string(kRowMultiple) +
                      " bytes, got " + std::to_string(bytes) + " bytes");
  }
  if (rows.untyped_data() != cleared->untyped_data()) {
    const Status copied = copy(cleared->untyped_data(), rows.untyped_data(), bytes, stream);
    if (!copied.ok()) return to_ffi(copied);
  }
  return to_ffi(clear_rows(cleared->untyped_data(), flags.untyped_data(), count, bytes / count,
                           ordinal, stream));
}

XLA_FFI_DEFINE_HANDLER(
    kLoad, Load,
    ffi::Ffi::BindInitialize().Ctx<ffi::DeviceOrdinal>().RemainingArgs().RemainingRets());
XLA_FFI_DEFINE_HANDLER(kClear, Clear,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::Buffer<ffi::U8>>()
                           .Ret<ffi::AnyBuffer>(),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

std::map<std::string, void*> clear_rows_handlers() {
  return {{"initialize", reinterpret_cast<void*>(kLoad)},
          {"execute", reinterpret_cast<void*>(kClear)}};
}

}  // namespace attn_dispatch
