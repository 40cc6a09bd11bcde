// The handlers' steps without XLA, for tests: from attributes and shapes of any size to the struct
// that would be launched. No pointer is followed.
#include <string.h>

#include <cstdio>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "array_reader.h"
#include "call_site.h"
#include "call_structs.h"
#include "emulator_buffers.h"
#include "export.h"
#include "kernel_limits.h"

namespace {

using namespace attn_dispatch;

void set(std::string_view& field, const std::string& text) { field = text; }
void set(bool& field, const std::string& text) { field = text == "true"; }
void set(int64_t& field, const std::string& text) { field = std::stoll(text); }
void set(float& field, const std::string& text) { field = std::strtof(text.c_str(), nullptr); }

// Reads lines of "name=value".
std::map<std::string, std::string> values_by_name(const char* lines) {
  std::map<std::string, std::string> found;
  std::istringstream stream(lines);
  for (std::string line; std::getline(stream, line);) {
    const size_t equals = line.find('=');
    found[line.substr(0, equals)] = line.substr(equals + 1);
  }
  return found;
}

Status prepare(Pass pass, const Attributes& attributes, ArrayReader& arrays, void* into,
               int64_t size) {
  const auto copy = [&](const auto& call) -> Status {
    ATTN_RETURN_IF_ERROR(check_limits(call));
    if (size != static_cast<int64_t>(sizeof call)) return {Code::kWrongCall, "another struct"};
    memcpy(into, &call, sizeof call);
    return {};
  };
  const Result<CallSite> site = decode_call_site(attributes, pass);
  if (!site.ok()) return site.status;
  if (pass == Pass::kForward) {
    const AttnAiterForward call = forward_struct(site.value, arrays);
    ATTN_RETURN_IF_ERROR(arrays.status());
    return copy(call);
  }
  if (pass == Pass::kSplitKv) {
    const AttnAiterSplitKv call = split_kv_struct(site.value, arrays);
    ATTN_RETURN_IF_ERROR(arrays.status());
    return copy(call);
  }
  const BackwardCall backward = backward_struct(site.value, arrays);
  ATTN_RETURN_IF_ERROR(arrays.status());
  return copy(backward.call);
}

}  // namespace

// Prepares one call. `pass` is Pass's number, `lines` has "name=value" for each attribute, and the
// first `num_operands` buffers are operands. Returns 0 with the struct in `into`, or 1 with the
// sentence.
ATTN_EXPORT int attn_rocm_prepare(int pass, const char* lines, int64_t num_buffers,
                                  int64_t num_operands, const int32_t* dtypes, const int64_t* ranks,
                                  const int64_t* const* dims, void* const* data, void* into,
                                  int64_t size, char* message, int32_t message_size) {
  const auto fail = [&](const std::string& sentence) {
    std::snprintf(message, static_cast<size_t>(message_size), "%s", sentence.c_str());
    return 1;
  };
  const auto texts = values_by_name(lines);
  Attributes attributes;
#define FIELD(type, name)                                           \
  if (const auto found = texts.find(#name); found != texts.end()) { \
    set(attributes.name, found->second);                            \
  } else {                                                          \
    return fail("missing " #name);                                  \
  }
  ATTN_AITER_SPEC(FIELD)
#undef FIELD

  std::vector<XLA_FFI_Buffer> buffers(num_buffers);
  std::vector<void*> places;
  for (int64_t i = 0; i < num_buffers; ++i) {
    buffers[i] = {XLA_FFI_Buffer_STRUCT_SIZE,
                  nullptr,
                  static_cast<XLA_FFI_DataType>(dtypes[i]),
                  data[i],
                  ranks[i],
                  const_cast<int64_t*>(dims[i])};
    places.push_back(&buffers[i]);
  }
  std::vector<XLA_FFI_ArgType> arg_types(num_buffers, XLA_FFI_ArgType_BUFFER);
  std::vector<XLA_FFI_RetType> ret_types(num_buffers, XLA_FFI_RetType_BUFFER);
  XLA_FFI_Args args{XLA_FFI_Args_STRUCT_SIZE, nullptr, num_operands, arg_types.data(),
                    places.data()};
  XLA_FFI_Rets rets{XLA_FFI_Rets_STRUCT_SIZE, nullptr, num_buffers - num_operands, ret_types.data(),
                    places.data() + num_operands};
  const xla::ffi::RemainingArgs operands(&args, 0);
  const xla::ffi::RemainingRets results(&rets, 0);
  ArrayReader arrays(operands, results);
  const Status status = prepare(static_cast<Pass>(pass), attributes, arrays, into, size);
  attn_emulator_clear_buffers();
  return status.ok() ? 0 : fail(status.message);
}
