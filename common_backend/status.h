// One outcome type for everything that can fail: a code that says whose fault it is and a sentence
// for the person who has to act. Nothing in our libraries throws across its boundary or aborts.
#pragma once

#include <string>
#include <utility>

namespace attn_dispatch {

enum class Code {
  kOk,
  kWrongCall,       // the attributes or buffers contradict each other
  kUnsupported,     // the vendor's library has no kernel for this call, or a known bug forbids it
  kFinalizeFailed,  // cuDNN proposed engines and none of them could be finalized
  kLibrary,         // a library is missing, of a version out of range, or failed by itself
  kDevice,          // the driver or the device refused
};

// The name under which Python and the messages speak of a code.
inline const char* code_name(Code code) {
  switch (code) {
    case Code::kOk:
      return "ok";
    case Code::kWrongCall:
      return "wrong call";
    case Code::kUnsupported:
      return "unsupported";
    case Code::kFinalizeFailed:
      return "finalize failed";
    case Code::kLibrary:
      return "library";
    case Code::kDevice:
      return "device";
  }
  return "unknown";
}

struct [[nodiscard]] Status {
  Code code = Code::kOk;
  std::string message;

  bool ok() const { return code == Code::kOk; }

  // Whether the same question may be answered otherwise later: a missing library is installed, a
  // full device has room again. What cuDNN refuses it always refuses.
  bool may_pass() const { return code == Code::kLibrary || code == Code::kDevice; }
};

template <typename T>
struct [[nodiscard]] Result {
  T value{};
  Status status;

  Result() = default;
  Result(T v) : value(std::move(v)) {}                    // NOLINT: implicit on purpose
  Result(Status failure) : status(std::move(failure)) {}  // NOLINT: implicit on purpose

  bool ok() const { return status.ok(); }
};

// Returns from the calling function if `expression`, a Status, is a failure. A single statement, so
// that it may stand in an if without braces.
#define ATTN_RETURN_IF_ERROR(expression)                 \
  do {                                                   \
    ::attn_dispatch::Status attn_status_ = (expression); \
    if (!attn_status_.ok()) return attn_status_;         \
  } while (false)

}  // namespace attn_dispatch
