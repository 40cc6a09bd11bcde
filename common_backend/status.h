// The outcome of everything that can fail: a code for the kind of failure, and a sentence for the
// person who has to act on it. Nothing in these libraries throws across the FFI or aborts.
#pragma once

#include <string>
#include <utility>

namespace attn_dispatch {

enum class Code {
  kOk,
  kWrongCall,       // the attributes or buffers contradict each other
  kUnsupported,     // the vendor's library has no kernel for this call, or a known bug forbids it
  kFinalizeFailed,  // cuDNN proposed engines, and none of them could be finalized
  kLibrary,         // a library is missing, has an unsupported version, or failed internally
  kDevice,          // the driver or the device failed
};

// The name of a code in messages and in Python.
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

  // Whether the same call may succeed later: once a missing library is installed, or a full device
  // has memory again. What cuDNN refuses, it always refuses.
  bool is_transient() const { return code == Code::kLibrary || code == Code::kDevice; }
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
