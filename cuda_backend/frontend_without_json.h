// Included before every other header by the files that use cudnn-frontend. cudnn-frontend writes
// the nodes of graphs as JSON, for which the compiler needs a fifth of its time. Nothing here does:
// a plan is serialized without the graph that it was made from. So these conversions are left out.
#pragma once

// The conversions that plans need come before the macros below, in this order.
// clang-format off
#include <cudnn.h>
#include <cudnn_frontend_utils.h>
#include <cudnn_frontend/graph_helpers.h>
// clang-format on

#include <stdexcept>

// For the classes of nodes and tensors. A plan that needed one could not be written or read.
#undef NLOHMANN_DEFINE_TYPE_INTRUSIVE
#define NLOHMANN_DEFINE_TYPE_INTRUSIVE(Type, ...)                    \
  [[noreturn]] friend void to_json(nlohmann::json&, const Type&) {   \
    throw std::logic_error(#Type " is not written as JSON here");    \
  }                                                                  \
  [[noreturn]] friend void from_json(const nlohmann::json&, Type&) { \
    throw std::logic_error(#Type " is not read as JSON here");       \
  }

// For the names of their inputs and outputs.
#undef NLOHMANN_JSON_SERIALIZE_ENUM
#define NLOHMANN_JSON_SERIALIZE_ENUM(...)
