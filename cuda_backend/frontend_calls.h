// Turns the failures of cudnn-frontend into statuses.
#pragma once

#include <cudnn_frontend.h>

#include <exception>
#include <string>

#include "cudnn_failure.h"
#include "status.h"

namespace attn_dispatch {

namespace fe = cudnn_frontend;

// Calls a function in which cudnn-frontend or its JSON library may throw; the failure is a status.
template <typename Function>
auto catch_exceptions(Function&& function) -> decltype(function()) {
  try {
    return function();
  } catch (const fe::cudnnException& e) {
    return cudnn_failure("cudnn-frontend failed", e.what(), Code::kUnsupported);
  } catch (const std::exception& e) {
    return Status{Code::kLibrary, std::string("cudnn-frontend failed: ") + e.what()};
  } catch (...) {
    return Status{Code::kLibrary, "cudnn-frontend failed for an unknown reason"};
  }
}

inline Status frontend_status(fe::error_t error, Code code, const char* step) {
  if (error.is_good()) return {};
  if (error.get_code() == fe::error_code_t::CUDA_API_FAILED) code = Code::kDevice;
  return cudnn_failure(step, error.get_message(), code);
}

}  // namespace attn_dispatch
