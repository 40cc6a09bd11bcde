// Reads the attributes of a custom call by name, and refuses what does not fit. A module lowered by
// another version of these libraries, or written by hand, may lack attributes, have others, or use
// other types.
#pragma once

#include <set>
#include <string>
#include <string_view>

#include "status.h"
#include "wrong_value.h"
#include "xla/ffi/api/ffi.h"

namespace attn_dispatch {

// Collects every attribute that is missing, unknown or of another type.
class AttributeReader {
 public:
  explicit AttributeReader(const xla::ffi::Dictionary& attributes) : attributes_(attributes) {}

  // Decodes the attribute as a Type, from which the field is constructed.
  template <typename Type, typename Field>
  void read(const char* name, Field* field) {
    known_.insert(name);
    if (!attributes_.contains(name)) return add(std::string("missing ") + name);
    auto value = attributes_.get<Type>(name);
    if (!value) return add(std::string(name) + ": " + value.error().message());
    *field = Field(*value);
  }

  // What is wrong with the attributes, once all known ones have been read.
  Status status() {
    for (const std::string_view name : attributes_) {
      if (!known_.count(name)) add("unknown " + excerpt(name));
    }
    return errors_.empty() ? Status{} : wrong_attributes(errors_);
  }

  static Status wrong_attributes(const std::string& errors) {
    return {Code::kWrongCall, "attributes of the custom call: " + errors};
  }

 private:
  void add(const std::string& error) { errors_ += (errors_.empty() ? "" : "; ") + error; }

  const xla::ffi::Dictionary& attributes_;
  std::set<std::string_view> known_;
  std::string errors_;
};

}  // namespace attn_dispatch
