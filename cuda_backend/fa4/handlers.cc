// The handlers of five custom calls, forward, backward and tangent, and forward and backward of
// wide heads, each in three stages. Instantiate decodes the attributes and finds the kernels.
// Initialize loads them on the device, before any command buffer is captured. Execute checks all
// arrays and queues the kernels. All memory is XLA's: operands, results, and scratch as further
// results.
#include "handlers.h"

#include <cmath>
#include <memory>
#include <vector>

#include "attribute_reader.h"
#include "calls.h"
#include "environment.h"
#include "ffi_error.h"
#include "library.h"
#include "status.h"
#include "stream.h"
#include "tangent.h"
#include "wide.h"
#include "wrong_value.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace attn_dispatch {
namespace {

ffi::Error to_ffi(const Status& status) {
  return ffi_error("attn_dispatch FlashAttention-4: ", status);
}

struct Fa4Call {
  static ffi::TypeId id;
  static ffi::TypeInfo info;

  CompiledSet* set;
  CallKind kind;
  float scale;
  bool poisons;
};

ffi::TypeId Fa4Call::id = {};
ffi::TypeInfo Fa4Call::info = ffi::MakeTypeInfo<Fa4Call>();

Result<Fa4Spec> decode(const ffi::Dictionary& attributes, Pass pass) {
  Fa4Spec spec;
  AttributeReader reader(attributes);
  std::string mask = "rows";
  reader.read<std::string_view>("set", &spec.set);
  if (pass == Pass::kWideForward || pass == Pass::kWideBackward) {
    reader.read<bool>("causal", &spec.kind.is_causal);
    reader.read<int64_t>("keys", &spec.kind.keys);
  } else {
    reader.read<std::string_view>("mask", &mask);
    reader.read<int64_t>("tile_m", &spec.tile_m);
    reader.read<int64_t>("tile_n", &spec.tile_n);
  }
  if (pass == Pass::kForward) reader.read<bool>("sinks", &spec.kind.has_sinks);
  reader.read<float>("scale", &spec.scale);
  ATTN_RETURN_IF_ERROR(reader.status());
  if (mask != "rows" && mask != "bits") return wrong_value("mask", "rows or bits", mask);
  spec.kind.mask = mask == "bits" ? MaskForm::kBits : MaskForm::kRows;
  if (!std::isfinite(spec.scale)) return wrong_value("scale", "a finite number", spec.scale);
  return spec;
}

template <Pass pass>
ffi::ErrorOr<std::unique_ptr<Fa4Call>> Instantiate(ffi::Dictionary attributes) {
  const Result<Fa4Spec> spec = decode(attributes, pass);
  if (!spec.ok()) return ffi::Unexpected(to_ffi(spec.status));
  const Result<CompiledSet*> set = find_set(spec.value, pass);
  if (!set.ok()) return ffi::Unexpected(to_ffi(set.status));
  const Result<bool> poison = poison_requested();
  if (!poison.ok()) return ffi::Unexpected(to_ffi(poison.status));
  return std::make_unique<Fa4Call>(
      Fa4Call{set.value, spec.value.kind, spec.value.scale, poison.value});
}

template <Pass pass>
ffi::Error Initialize(int32_t ordinal, Fa4Call* call, ffi::RemainingArgs, ffi::RemainingRets,
                      ffi::Dictionary) {
  return to_ffi(load_pass(*call->set, call->kind, pass, ordinal));
}

ElementType type_of(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::F16:
      return ElementType::kFloat16;
    case ffi::DataType::BF16:
      return ElementType::kBFloat16;
    case ffi::DataType::F32:
      return ElementType::kFloat32;
    case ffi::DataType::S32:
      return ElementType::kInt32;
    case ffi::DataType::U32:
      return ElementType::kUInt32;
    default:
      return ElementType::kOther;
  }
}

Array array_of(const ffi::AnyBuffer& buffer) {
  const auto shape = buffer.dimensions();
  return {buffer.untyped_data(), type_of(buffer.element_type()), Shape(shape.begin(), shape.end()),
          static_cast<int64_t>(buffer.size_bytes())};
}

template <Pass pass>
ffi::Error Execute(cudaStream_t stream, int32_t ordinal, Fa4Call* call, ffi::RemainingArgs args,
                   ffi::RemainingRets rets, ffi::Dictionary) {
  std::vector<Array> operands, results;
  operands.reserve(args.size());
  results.reserve(rets.size());
  for (size_t i = 0; i < args.size(); ++i) {
    operands.push_back(array_of(*args.get<ffi::AnyBuffer>(i)));
  }
  for (size_t i = 0; i < rets.size(); ++i) {
    results.push_back(array_of(**rets.get<ffi::AnyBuffer>(i)));
  }
  if (Status status = load_pass(*call->set, call->kind, pass, ordinal); !status.ok()) {
    return to_ffi(status);
  }
  constexpr auto kRun = pass == Pass::kForward       ? run_forward
                        : pass == Pass::kBackward    ? run_backward
                        : pass == Pass::kTangent     ? run_tangent
                        : pass == Pass::kWideForward ? run_wide_forward
                                                     : run_wide_backward;
  return to_ffi(
      kRun(*call->set, call->kind, call->scale, operands, results, call->poisons, stream));
}

auto instantiation() { return ffi::Ffi::BindInstantiate().Attrs(); }

auto initialization() {
  return ffi::Ffi::BindInitialize()
      .Ctx<ffi::DeviceOrdinal>()
      .Ctx<ffi::State<Fa4Call>>()
      .RemainingArgs()
      .RemainingRets()
      .Attrs();
}

auto execution() {
  return ffi::Ffi::Bind()
      .Ctx<StreamContext<cudaStream_t>>()
      .Ctx<ffi::DeviceOrdinal>()
      .Ctx<ffi::State<Fa4Call>>()
      .RemainingArgs()
      .RemainingRets()
      .Attrs();
}

XLA_FFI_DEFINE_HANDLER(kFindForward, Instantiate<Pass::kForward>, instantiation());
XLA_FFI_DEFINE_HANDLER(kLoadForward, Initialize<Pass::kForward>, initialization());
XLA_FFI_DEFINE_HANDLER(kForward, Execute<Pass::kForward>, execution(),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kFindBackward, Instantiate<Pass::kBackward>, instantiation());
XLA_FFI_DEFINE_HANDLER(kLoadBackward, Initialize<Pass::kBackward>, initialization());
XLA_FFI_DEFINE_HANDLER(kBackward, Execute<Pass::kBackward>, execution(),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kFindTangent, Instantiate<Pass::kTangent>, instantiation());
XLA_FFI_DEFINE_HANDLER(kLoadTangent, Initialize<Pass::kTangent>, initialization());
XLA_FFI_DEFINE_HANDLER(kTangent, Execute<Pass::kTangent>, execution(),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kFindWideForward, Instantiate<Pass::kWideForward>, instantiation());
XLA_FFI_DEFINE_HANDLER(kLoadWideForward, Initialize<Pass::kWideForward>, initialization());
XLA_FFI_DEFINE_HANDLER(kWideForward, Execute<Pass::kWideForward>, execution(),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kFindWideBackward, Instantiate<Pass::kWideBackward>, instantiation());
XLA_FFI_DEFINE_HANDLER(kLoadWideBackward, Initialize<Pass::kWideBackward>, initialization());
XLA_FFI_DEFINE_HANDLER(kWideBackward, Execute<Pass::kWideBackward>, execution(),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

std::map<std::string, void*> fa4_forward_handlers() {
  return {{"instantiate", reinterpret_cast<void*>(kFindForward)},
          {"initialize", reinterpret_cast<void*>(kLoadForward)},
          {"execute", reinterpret_cast<void*>(kForward)}};
}

std::map<std::string, void*> fa4_backward_handlers() {
  return {{"instantiate", reinterpret_cast<void*>(kFindBackward)},
          {"initialize", reinterpret_cast<void*>(kLoadBackward)},
          {"execute", reinterpret_cast<void*>(kBackward)}};
}

std::map<std::string, void*> fa4_tangent_handlers() {
  return {{"instantiate", reinterpret_cast<void*>(kFindTangent)},
          {"initialize", reinterpret_cast<void*>(kLoadTangent)},
          {"execute", reinterpret_cast<void*>(kTangent)}};
}

std::map<std::string, void*> fa4_wide_forward_handlers() {
  return {{"instantiate", reinterpret_cast<void*>(kFindWideForward)},
          {"initialize", reinterpret_cast<void*>(kLoadWideForward)},
          {"execute", reinterpret_cast<void*>(kWideForward)}};
}

std::map<std::string, void*> fa4_wide_backward_handlers() {
  return {{"instantiate", reinterpret_cast<void*>(kFindWideBackward)},
          {"initialize", reinterpret_cast<void*>(kLoadWideBackward)},
          {"execute", reinterpret_cast<void*>(kWideBackward)}};
}

std::map<std::string, void*> fa4_state_type() {
  return {{"type_id", &Fa4Call::id}, {"type_info", &Fa4Call::info}};
}

}  // namespace attn_dispatch
