#include "ffi_attributes.h"

#include <string_view>
#include <utility>

#include "attribute_reader.h"
#include "validate.h"

namespace attn_dispatch {
namespace {

// The type as which FFI decodes an attribute: it knows no Text.
template <typename T>
struct AttributeOf {
  using Type = T;
};
template <>
struct AttributeOf<Text> {
  using Type = std::string_view;
};

}  // namespace

Result<SdpaSpec> spec_of(const xla::ffi::Dictionary& attributes) {
  SdpaSpec spec;
  AttributeReader reader(attributes);
#define FIELD(type, name) reader.read<AttributeOf<type>::Type>(#name, &spec.name);
  ATTN_SDPA_SPEC(FIELD)
#undef FIELD
  ATTN_RETURN_IF_ERROR(reader.status());
  auto checked = validated(std::move(spec));
  if (checked.ok()) return checked;
  return AttributeReader::wrong_attributes(checked.status.message);
}

}  // namespace attn_dispatch
