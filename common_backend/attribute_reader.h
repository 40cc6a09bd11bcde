// The attributes of a custom call, by name. A module lowered by another version of these libraries,
// or by hand, may lack some, have others, or mean something else by them.
#pragma once

#include <set>
#include <string>
#include <string_view>

#include "status.h"
#include "wrong_value.h"
#include "xla/ffi/api/ffi.h"

namespace attn_dispatch {

// Collects what is missing, unknown or of another type, all of it by name.
class AttributeReader {
 public:
  explicit AttributeReader(const xla::ffi::Dictionary& attributes) : attributes_(attributes) {}

  // Into a field that is constructed from a Type, which FFI decodes.
  template <typename Type, typename Field>
  void take(const char* name, Field* field) {
    known_.insert(name);
    if (!attributes_.contains(name)) return add(std::string("missing ") + name);
    auto value = attributes_.get<Type>(name);
    if (!value) return add(std::string(name) + ": " + value.error().message());
    *field = Field(*value);
  }

  // Once all that are known are taken.
  Status status() {
    for (const std::string_view name : attributes_) {
      if (!known_.count(name)) add("unknown " + beginning(name));
    }
    return wrong_.empty() ? Status{} : wrong_attributes(wrong_);
  }

  static Status wrong_attributes(const std::string& what) {
    return {Code::kWrongCall, "attributes of the custom call: " + what};
  }

 private:
  void add(const std::string& what) { wrong_ += (wrong_.empty() ? "" : "; ") + what; }

  const xla::ffi::Dictionary& attributes_;
  std::set<std::string_view> known_;
  std::string wrong_;
};

}  // namespace attn_dispatch
