#include "cudnn_failure.h"

#include <optional>

namespace attn_dispatch {
namespace {

// How the names begin of statuses for which the machine, not the call, is at fault, as
// cudnnGetErrorString writes them.
constexpr const char* kMachineStatuses[] = {
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR",
    "CUDNN_STATUS_EXECUTION_FAILED",
    "CUDNN_STATUS_NOT_INITIALIZED",
    "CUDNN_STATUS_SUBLIBRARY_",
    "CUDNN_STATUS_LICENSE_ERROR",
    "CUDNN_STATUS_MAPPING_ERROR",
    "CUDNN_STATUS_RUNTIME_PREREQUISITE_MISSING",
    "CUDNN_STATUS_NOT_SUPPORTED_RUNTIME_",
    "CUDNN_STATUS_NOT_SUPPORTED_SUBLIBRARY_",
};

std::string line_at(const std::string& text, size_t position) {
  const size_t before = text.rfind('\n', position);
  const size_t start = before == std::string::npos ? 0 : before + 1;
  return text.substr(start, text.find('\n', position) - start);
}

// The first reason in a message, which lists every engine that cuDNN tried, each with a page of
// warnings.
std::string first_reason(const std::string& message) {
  const auto reason = message.find("Reason: ");
  if (reason == std::string::npos) return message.substr(0, message.find('\n'));
  const auto start = reason + std::string("Reason: ").size();
  return message.substr(start, message.find_first_of("\n", start) - start);
}

// The line of the message that names a status of the machine, if there is one.
std::optional<std::string> machine_failure(const std::string& message) {
  // Messages are "Error: NAME; Reason: …" or "…, and code: NAME". A reason may be an expression
  // that names a status without having it: "(CUDNN_STATUS_NOT_INITIALIZED == status) || …" is the
  // call's fault.
  for (const char* name : kMachineStatuses) {
    const size_t at = message.find(std::string(": ") + name);
    if (at != std::string::npos) return line_at(message, at);
  }
  return {};
}

}  // namespace

Status cudnn_failure(const std::string& step, const std::string& message, Code refusal) {
  if (const auto line = machine_failure(message)) {
    return {refusal == Code::kDevice ? Code::kDevice : Code::kLibrary, step + ": " + *line};
  }
  return {refusal, step + ": " + first_reason(message)};
}

}  // namespace attn_dispatch
