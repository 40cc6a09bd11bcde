// The handlers of two custom calls, forward and backward, each in three stages. Instantiate decodes
// the attributes and finds the kernels. Initialize loads them on the device, before any command
// buffer is captured. Execute checks all arrays and queues the kernels. All memory is XLA's:
// operands, results, and scratch as further results.
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

Result<Fa4Spec> decode(const ffi::Dictionary& attributes, bool is_backward) {
  Fa4Spec spec;
  AttributeReader reader(attributes);
  std::string mask;
  reader.read<std::string_view>("set", &spec.set);
  reader.read<std::string_view>("mask", &mask);
  if (!is_backward) reader.read<bool>("sinks", &spec.kind.has_sinks);
  reader.read<int64_t>("tile_m", &spec.tile_m);
  reader.read<int64_t>("tile_n", &spec.tile_n);
  reader.read<float>("scale", &spec.scale);
  ATTN_RETURN_IF_ERROR(reader.status());
  if (mask != "rows" && mask != "bits") return wrong_value("mask", "rows or bits", mask);
  spec.kind.mask = mask == "bits" ? MaskForm::kBits : MaskForm::kRows;
  if (!std::isfinite(spec.scale)) return wrong_value("scale", "a finite number", spec.scale);
  return spec;
}

template <bool is_backward>
ffi::ErrorOr<std::unique_ptr<Fa4Call>> Instantiate(ffi::Dictionary attributes) {
  const Result<Fa4Spec> spec = decode(attributes, is_backward);
  if (!spec.ok()) return ffi::Unexpected(to_ffi(spec.status));
  const Result<CompiledSet*> set = find_set(spec.value, is_backward);
  if (!set.ok()) return ffi::Unexpected(to_ffi(set.status));
  const Result<bool> poison = poison_requested();
  if (!poison.ok()) return ffi::Unexpected(to_ffi(poison.status));
  return std::make_unique<Fa4Call>(
      Fa4Call{set.value, spec.value.kind, spec.value.scale, poison.value});
}

template <bool is_backward>
ffi::Error Initialize(int32_t ordinal, Fa4Call* call, ffi::RemainingArgs, ffi::RemainingRets,
                      ffi::Dictionary) {
  return to_ffi(load_pass(*call->set, call->kind, is_backward, ordinal));
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
  return {buffer.untyped_data(), type_of(buffer.element_type()),
          std::vector<int64_t>(shape.begin(), shape.end()),
          static_cast<int64_t>(buffer.size_bytes())};
}

template <bool is_backward>
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
  if (Status status = load_pass(*call->set, call->kind, is_backward, ordinal); !status.ok()) {
    return to_ffi(status);
  }
  const auto run = is_backward ? run_backward : run_forward;
  return to_ffi(run(*call->set, call->kind, call->scale, operands, results, call->poisons, stream));
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
      .Ctx<StreamContext>()
      .Ctx<ffi::DeviceOrdinal>()
      .Ctx<ffi::State<Fa4Call>>()
      .RemainingArgs()
      .RemainingRets()
      .Attrs();
}

XLA_FFI_DEFINE_HANDLER(kFindForward, Instantiate<false>, instantiation());
XLA_FFI_DEFINE_HANDLER(kFindBackward, Instantiate<true>, instantiation());
XLA_FFI_DEFINE_HANDLER(kLoadForward, Initialize<false>, initialization());
XLA_FFI_DEFINE_HANDLER(kLoadBackward, Initialize<true>, initialization());
XLA_FFI_DEFINE_HANDLER(kForward, Execute<false>, execution(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kBackward, Execute<true>, execution(), {ffi::Traits::kCmdBufferCompatible});

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

std::map<std::string, void*> fa4_state_type() {
  return {{"type_id", &Fa4Call::id}, {"type_info", &Fa4Call::info}};
}

}  // namespace attn_dispatch
