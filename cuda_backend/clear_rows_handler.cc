// The custom call attn_dispatch_clear_rows. It clears padding rows (clear_rows.h) of results that
// other libraries' kernels wrote, in place: XLA would read and write the whole array.
//
// Operands: up to kMostArrays arrays of rows, of any shape; then flags of each, one u8 per row. The
// results are the arrays again, in the same buffers. A result is another buffer, to which rows are
// copied, if XLA made the operand a slice of a larger array (in a scan).
#include <array>
#include <string>

#include "clear_rows.h"
#include "ffi_error.h"
#include "handlers.h"
#include "library.h"
#include "status.h"
#include "stream.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace attn_dispatch {
namespace {

ffi::Error to_ffi(const Status& status) { return ffi_error("attn_dispatch_clear_rows: ", status); }

// Loads the kernel before any command buffer is captured.
ffi::Error Load(int32_t ordinal, ffi::RemainingArgs, ffi::RemainingRets) {
  // The driver is not loaded yet if cuDNN was not used.
  if (!has_driver()) return to_ffi({Code::kLibrary, "no CUDA driver library can be loaded"});
  return to_ffi(load_clear_rows(ordinal));
}

// The rows of a result, to which they are copied if they are not there yet.
Status in_result(const ffi::AnyBuffer& rows, const ffi::AnyBuffer& flags,
                 const ffi::AnyBuffer& result, cudaStream_t stream, FlaggedRows& found) {
  const auto count = static_cast<int64_t>(flags.element_count());
  const auto bytes = static_cast<int64_t>(rows.size_bytes());
  if (const auto size = static_cast<int64_t>(result.size_bytes()); size != bytes) {
    return {Code::kWrongCall, "expected a result of " + std::to_string(bytes) +
                                  " bytes, as the rows, got " + std::to_string(size)};
  }
  if (flags.element_type() != ffi::U8) return {Code::kWrongCall, "expected flags of type u8"};
  found = {result.untyped_data(), flags.untyped_data(), kRowMultiple, 0};
  if (bytes == 0) return {};
  if (count == 0 || bytes % count != 0 || bytes / count % kRowMultiple != 0) {
    return {Code::kWrongCall,
            "expected " + std::to_string(count) + " rows, one per flag, of a multiple of " +
                std::to_string(kRowMultiple) + " bytes, got " + std::to_string(bytes) + " bytes"};
  }
  found.row_bytes = bytes / count;
  found.count = count;
  if (rows.untyped_data() == found.rows) return {};
  return copy(found.rows, rows.untyped_data(), bytes, stream);
}

ffi::Error Clear(cudaStream_t stream, int32_t ordinal, ffi::RemainingArgs args,
                 ffi::RemainingRets rets) {
  const size_t number = rets.size();
  if (number == 0 || args.size() != 2 * number || number > kMostArrays) {
    return to_ffi({Code::kWrongCall, "expected 1 to " + std::to_string(kMostArrays) +
                                         " arrays with flags for each, got " +
                                         std::to_string(args.size()) + " operands and " +
                                         std::to_string(number) + " results"});
  }
  std::array<FlaggedRows, kMostArrays> arrays{};
  for (size_t i = 0; i < number; ++i) {
    const Status status =
        in_result(*args.get<ffi::AnyBuffer>(i), *args.get<ffi::AnyBuffer>(number + i),
                  **rets.get<ffi::AnyBuffer>(i), stream, arrays[i]);
    if (!status.ok()) return to_ffi(status);
  }
  return to_ffi(clear_rows(arrays.data(), number, ordinal, stream));
}

XLA_FFI_DEFINE_HANDLER(
    kLoad, Load,
    ffi::Ffi::BindInitialize().Ctx<ffi::DeviceOrdinal>().RemainingArgs().RemainingRets());
XLA_FFI_DEFINE_HANDLER(kClear, Clear,
                       ffi::Ffi::Bind()
                           .Ctx<StreamContext<cudaStream_t>>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .RemainingArgs()
                           .RemainingRets(),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

std::map<std::string, void*> clear_rows_handlers() {
  return {{"initialize", reinterpret_cast<void*>(kLoad)},
          {"execute", reinterpret_cast<void*>(kClear)}};
}

}  // namespace attn_dispatch
