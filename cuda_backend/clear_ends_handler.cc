// The custom call attn_dispatch_clear_ends. It clears rows past the last packed sequence
// (clear_ends.h) of results that other libraries' kernels wrote, in place.
//
// Operands: up to kMostEnds arrays, whose first axis are the rows, and the sequences' offsets, s32.
// The results are the arrays again, in the same buffers, or in others to which they are copied.
// Attributes: has_lse, whether the last array is lse, f32 [heads, rows], in which padding is -inf
// instead of 0; invalid_is_nan, whether rows of wrong offsets become NaN, or as padding.
#include <array>
#include <string>

#include "clear_ends.h"
#include "ffi_error.h"
#include "handlers.h"
#include "library.h"
#include "status.h"
#include "stream.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace attn_dispatch {
namespace {

constexpr int64_t kWord = 4;
constexpr uint32_t kMinusInfinity = 0xff800000, kNan = 0xffffffff;

ffi::Error to_ffi(const Status& status) { return ffi_error("attn_dispatch_clear_ends: ", status); }

// Loads the kernel before any command buffer is captured.
ffi::Error Load(int32_t ordinal, ffi::RemainingArgs, ffi::RemainingRets, bool, bool) {
  // The driver is not loaded yet if cuDNN was not used.
  if (!has_driver()) return to_ffi({Code::kLibrary, "no CUDA driver library can be loaded"});
  return to_ffi(load_clear_ends(ordinal));
}

// A result, to which the array is copied if it is not there yet.
Status in_result(const ffi::AnyBuffer& array, const ffi::AnyBuffer& result, bool is_lse,
                 cudaStream_t stream, EndsToClear& found) {
  const auto bytes = static_cast<int64_t>(array.size_bytes());
  if (const auto size = static_cast<int64_t>(result.size_bytes()); size != bytes) {
    return {Code::kWrongCall, "expected a result of " + std::to_string(bytes) +
                                  " bytes, as the array, got " + std::to_string(size)};
  }
  const auto dims = array.dimensions();
  if (dims.size() < 1 || (is_lse && (dims.size() != 2 || array.element_type() != ffi::F32))) {
    return {Code::kWrongCall, is_lse ? "expected lse of type f32 with two axes"
                                     : "expected arrays with an axis of rows"};
  }
  found.words = result.untyped_data();
  found.times = is_lse ? dims[0] : 1;
  found.rows = is_lse ? dims[1] : dims[0];
  if (bytes == 0) {
    found.times = found.rows = 0;
    return {};
  }
  const int64_t row_bytes = bytes / (found.times * found.rows);
  if (row_bytes % kWord != 0) {
    return {Code::kWrongCall, "expected rows of a multiple of " + std::to_string(kWord) +
                                  " bytes, got " + std::to_string(row_bytes)};
  }
  found.row_words = row_bytes / kWord;
  if (array.untyped_data() == found.words) return {};
  return copy(found.words, array.untyped_data(), bytes, stream);
}

ffi::Error Clear(cudaStream_t stream, int32_t ordinal, ffi::RemainingArgs args,
                 ffi::RemainingRets rets, bool has_lse, bool invalid_is_nan) {
  const size_t number = rets.size();
  if (number == 0 || args.size() != number + 1 || number > kMostEnds) {
    return to_ffi({Code::kWrongCall, "expected 1 to " + std::to_string(kMostEnds) +
                                         " arrays and offsets, got " + std::to_string(args.size()) +
                                         " operands and " + std::to_string(number) + " results"});
  }
  const auto offsets = *args.get<ffi::AnyBuffer>(number);
  const auto count = static_cast<int64_t>(offsets.element_count());
  if (offsets.element_type() != ffi::S32 || count == 0) {
    return to_ffi({Code::kWrongCall, "expected offsets of type s32, at least one"});
  }
  std::array<EndsToClear, kMostEnds> arrays{};
  for (size_t i = 0; i < number; ++i) {
    const bool is_lse = has_lse && i + 1 == number;
    arrays[i].offsets = offsets.untyped_data();
    arrays[i].last = count - 1;
    arrays[i].padding = is_lse ? kMinusInfinity : 0;
    arrays[i].invalid = invalid_is_nan ? kNan : arrays[i].padding;
    const Status status = in_result(*args.get<ffi::AnyBuffer>(i), **rets.get<ffi::AnyBuffer>(i),
                                    is_lse, stream, arrays[i]);
    if (!status.ok()) return to_ffi(status);
  }
  return to_ffi(clear_ends(arrays.data(), number, ordinal, stream));
}

XLA_FFI_DEFINE_HANDLER(kLoad, Load,
                       ffi::Ffi::BindInitialize()
                           .Ctx<ffi::DeviceOrdinal>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attr<bool>("has_lse")
                           .Attr<bool>("invalid_is_nan"));
XLA_FFI_DEFINE_HANDLER(kClear, Clear,
                       ffi::Ffi::Bind()
                           .Ctx<StreamContext<cudaStream_t>>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attr<bool>("has_lse")
                           .Attr<bool>("invalid_is_nan"),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

std::map<std::string, void*> clear_ends_handlers() {
  return {{"initialize", reinterpret_cast<void*>(kLoad)},
          {"execute", reinterpret_cast<void*>(kClear)}};
}

}  // namespace attn_dispatch
