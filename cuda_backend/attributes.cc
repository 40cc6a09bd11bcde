#include "attributes.h"

#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "validate.h"
#include "wrong_value.h"

namespace ffi = xla::ffi;

namespace attn_dispatch {
namespace {

// FFI decodes Text through the view type that it knows.
template <typename T>
struct AttributeOf {
  using Type = T;
};
template <>
struct AttributeOf<Text> {
  using Type = std::string_view;
};

template <typename T>
std::string take(const ffi::Dictionary& attributes, std::string_view name, T* field) {
  if (!attributes.contains(name)) return "missing " + std::string(name);
  auto value = attributes.get<typename AttributeOf<T>::Type>(name);
  if (!value) return std::string(name) + ": " + value.error().message();
  *field = T(*value);
  return "";
}

}  // namespace

Result<SdpaSpec> spec_of(const ffi::Dictionary& attributes) {
  SdpaSpec spec;
  std::set<std::string_view> known;
  std::string wrong;
  const auto add = [&](const std::string& what) {
    if (!what.empty()) wrong += (wrong.empty() ? "" : "; ") + what;
  };
#define FIELD(type, name) \
  known.insert(#name);    \
  add(take(attributes, #name, &spec.name));
  ATTN_SDPA_SPEC(FIELD, FIELD)
#undef FIELD
  for (const std::string_view name : attributes) {
    if (!known.count(name)) add("unknown " + beginning(name));
  }
  if (wrong.empty()) {
    auto checked = validated(std::move(spec));
    if (checked.ok()) return checked;
    wrong = checked.status.message;
  }
  return Status{Code::kWrongCall, "attributes of the custom call: " + wrong};
}

}  // namespace attn_dispatch
