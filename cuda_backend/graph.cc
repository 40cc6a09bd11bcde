#include "graph.h"

#include <cudnn_frontend.h>

#include <optional>

#include "score_mod.h"

namespace attn_dispatch {
namespace fe = cudnn_frontend;
using Tensor = std::shared_ptr<fe::graph::Tensor_attributes>;
using fe::graph::Tensor_attributes;

namespace {

constexpr int64_t kBiasRowMultiple = 8;  // strides must be multiples of 16 bytes

int64_t bytes_of(fe::DataType_t type) {
  switch (type) {
    case fe::DataType_t::HALF:
    case fe::DataType_t::BFLOAT16:
      return 2;
    case fe::DataType_t::INT64:
      return 8;
    default:
      return 4;
  }
}

fe::DataType_t type_of(const Text& dtype) {
  if (dtype == "float16") return fe::DataType_t::HALF;
  return dtype == "bfloat16" ? fe::DataType_t::BFLOAT16 : fe::DataType_t::FLOAT;
}

// The operands that forward and backward share; null where the spec has none of them.
struct OptionTensors {
  Tensor lengths_q, lengths_kv;
  Tensor offsets_query, offsets_key, offsets_value, offsets_out, offsets_lse;
  Tensor bias, slopes, sinks, seed, seed_offset;
};

// Adds the call's tensors one after the other, numbering them in buffer order.
class GraphBuilder {
 public:
  GraphBuilder(const SdpaSpec& spec, DeviceFacts device)
      : s_(spec),
        dtype_(type_of(spec.dtype)),
        queries_{spec.num_heads, spec.seq_len_q, spec.rows_q()},
        keys_{spec.num_kv_heads, spec.seq_len_kv, spec.rows_kv()},
        graph_(std::make_shared<fe::graph::Graph>()) {
    // Before any node is added: each copies what it finds.
    graph_->set_sm_version(device.sm).set_sm_count(device.sm_count);
    graph_->set_io_data_type(dtype_)
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT);
  }

  void forward() {
    Tensor q = rows_operand("query", queries_, s_.head_dim);
    Tensor k = rows_operand("key", keys_, s_.head_dim);
    Tensor v = rows_operand("value", keys_, s_.head_dim_v);
    const OptionTensors options = option_operands();
    pack({{q, options.offsets_query}, {k, options.offsets_key}, {v, options.offsets_value}});

    auto attributes = fe::graph::SDPA_attributes().set_name("sdpa").set_generate_stats(s_.needs_lse);
    apply(attributes, options);
    if (options.sinks) attributes.set_sink_token(options.sinks);
    Tensor row_max, row_sum, keep;
    if (s_.needs_max) {
      attributes.set_logit_max(row_max = new_tensor("row_max"));
      attributes.set_score_sum_exp(row_sum = new_tensor("row_sum"));
    }
    if (s_.needs_keep) {
      attributes.set_rng_dump(keep = new_tensor("keep"));
      // Its shape is not inferred.
      keep->set_dim(score_dims()).set_stride(contiguous(score_dims()));
    }
    // The other implementation, cuDNN's choice, has no engine for lengths inside a score_mod.
    if (score_mod_ && s_.has_lengths) {
      attributes.set_implementation(fe::AttentionImplementation_t::COMPOSITE);
    }
    auto [out, lse] = graph_->sdpa(q, k, v, attributes);
    rows_result(out, queries_, s_.head_dim_v, options.offsets_out);
    if (s_.needs_lse) lse_result(lse, options.offsets_lse);
    if (s_.needs_max) {
      lse_result(row_max, options.offsets_lse);
      lse_result(row_sum, options.offsets_lse);
    }
    if (s_.needs_keep) result(keep, fe::DataType_t::FLOAT, score_dims());
  }

  void backward() {
    Tensor q = rows_operand("query", queries_, s_.head_dim);
    Tensor k = rows_operand("key", keys_, s_.head_dim);
    Tensor v = rows_operand("value", keys_, s_.head_dim_v);
    Tensor out = rows_operand("out", queries_, s_.head_dim_v);
    Tensor lse = lse_operand();
    Tensor out_grad = rows_operand("out_grad", queries_, s_.head_dim_v);
    const OptionTensors options = option_operands();
    pack({{q, options.offsets_query},
          {k, options.offsets_key},
          {v, options.offsets_value},
          {out, options.offsets_out},
          {out_grad, options.offsets_out},
          {lse, options.offsets_lse}});

    auto attributes = fe::graph::SDPA_backward_attributes().set_name("sdpa_backward");
    attributes.set_deterministic_algorithm(s_.deterministic);
    apply(attributes, options);
    if (score_mod_) {
      attributes.set_score_mod_bprop([mod = score_mod_](auto graph, auto grad) {
        return mod->backward(graph, grad);
      });
    }
    if (s_.is_packed()) {
      attributes.set_max_total_seq_len_q(queries_.rows).set_max_total_seq_len_kv(keys_.rows);
    }
    Tensor dbias;
    if (s_.needs_dbias) attributes.set_dbias(dbias = new_tensor("dbias"));
    auto [dq, dk, dv] = graph_->sdpa_backward(q, k, v, out, out_grad, lse, attributes);
    rows_result(dq, queries_, s_.head_dim, options.offsets_query);
    rows_result(dk, keys_, s_.head_dim, options.offsets_key);
    rows_result(dv, keys_, s_.head_dim_v, options.offsets_value);
    if (s_.needs_dbias) {
      result(dbias, dtype_,
             {s_.bias_batch, s_.bias_heads, s_.seq_len_q, s_.seq_len_kv});
    }
  }

  SdpaGraph finish() { return {std::move(graph_), std::move(buffer_bytes_)}; }

 private:
  using Dims = std::vector<int64_t>;

  // What queries and keys have of their own: `rows` are all there are, packed or not.
  struct Side {
    int64_t heads, length, rows;
  };

  static Tensor new_tensor(const char* name) {
    auto tensor = std::make_shared<Tensor_attributes>();
    tensor->set_name(name);
    return tensor;
  }

  static Dims contiguous(const Dims& dims) {
    Dims strides(dims.size(), 1);
    for (size_t i = dims.size() - 1; i > 0; --i) strides[i - 1] = strides[i] * dims[i];
    return strides;
  }

  // Gives a tensor the next buffer of the call.
  void number(const Tensor& tensor, int64_t bytes) {
    buffer_bytes_.push_back(bytes);
    tensor->set_uid(static_cast<int64_t>(buffer_bytes_.size()));
  }

  Tensor operand(const char* name, fe::DataType_t type, const Dims& dims) {
    Tensor tensor = graph_->tensor(Tensor_attributes().set_name(name).set_dim(dims).set_stride(
        contiguous(dims)));
    tensor->set_data_type(type);
    number(tensor, size(dims) * bytes_of(type));
    return tensor;
  }

  void result(const Tensor& tensor, fe::DataType_t type, const Dims& dims) {
    tensor->set_output(true).set_data_type(type).set_dim(dims).set_stride(contiguous(dims));
    number(tensor, size(dims) * bytes_of(type));
  }

  static int64_t size(const Dims& dims) {
    int64_t product = 1;
    for (int64_t dim : dims) product *= dim;
    return product;
  }

  // Arrays are [batch, length, heads, dim] and cuDNN sees [batch, heads, length, dim].
  void lay_out_rows(const Tensor& tensor, const Side& side, int64_t dim) {
    tensor->set_dim({s_.batch, side.heads, side.length, dim})
        .set_stride({side.length * side.heads * dim, dim, side.heads * dim, 1});
    number(tensor, side.rows * side.heads * dim * bytes_of(dtype_));
  }

  Tensor rows_operand(const char* name, const Side& side, int64_t dim) {
    Tensor tensor = graph_->tensor(Tensor_attributes().set_name(name));
    lay_out_rows(tensor, side, dim);
    return tensor;
  }

  void rows_result(const Tensor& tensor, const Side& side, int64_t dim, const Tensor& offsets) {
    tensor->set_output(true);
    lay_out_rows(tensor, side, dim);
    if (offsets) tensor->set_ragged_offset(offsets);
  }

  // float32 [B, N, T], packed [rows, N].
  void lay_out_lse(const Tensor& tensor) {
    const int64_t n = s_.num_heads, t = s_.seq_len_q;
    tensor->set_data_type(fe::DataType_t::FLOAT).set_dim({s_.batch, n, t, 1});
    tensor->set_stride(s_.is_packed() ? Dims{t * n, 1, n, 1} : Dims{n * t, t, 1, 1});
    number(tensor, queries_.rows * n * 4);
  }

  Tensor lse_operand() {
    Tensor tensor = graph_->tensor(Tensor_attributes().set_name("lse"));
    lay_out_lse(tensor);
    return tensor;
  }

  void lse_result(const Tensor& tensor, const Tensor& offsets) {
    tensor->set_output(true);
    lay_out_lse(tensor);
    if (offsets) tensor->set_ragged_offset(offsets);
  }

  Dims score_dims() const { return {s_.batch, s_.num_heads, s_.seq_len_q, s_.seq_len_kv}; }

  int64_t bias_row() const {
    return (s_.seq_len_kv + kBiasRowMultiple - 1) / kBiasRowMultiple * kBiasRowMultiple;
  }

  // One row stands for all of them by a stride of 0.
  void lay_out_bias(const Tensor& tensor, int64_t rows) {
    const auto type = type_of(s_.bias_dtype);
    const int64_t row = bias_row(), head = rows * row;
    tensor->set_data_type(type)
        .set_dim({s_.bias_batch, s_.bias_heads, s_.seq_len_q, s_.seq_len_kv})
        .set_stride({s_.bias_heads * head, head, rows == 1 ? 0 : row, 1});
    number(tensor, s_.bias_batch * s_.bias_heads * head * bytes_of(type));
  }

  OptionTensors option_operands() {
    using Type = fe::DataType_t;
    OptionTensors t;
    if (s_.has_lengths) {
      t.lengths_q = operand("lengths_q", Type::INT32, {s_.batch, 1, 1, 1});
      t.lengths_kv = operand("lengths_kv", Type::INT32, {s_.batch, 1, 1, 1});
    }
    if (s_.is_packed()) {
      for (auto [tensor, name] : {std::pair(&t.offsets_query, "offsets_query"),
                                  {&t.offsets_key, "offsets_key"},
                                  {&t.offsets_value, "offsets_value"},
                                  {&t.offsets_out, "offsets_out"},
                                  {&t.offsets_lse, "offsets_lse"}}) {
        if (tensor == &t.offsets_lse && !s_.has_statistics()) break;
        *tensor = operand(name, Type::INT32, {s_.batch + 1, 1, 1, 1});
      }
    }
    if (s_.has_bias()) {
      t.bias = graph_->tensor(Tensor_attributes().set_name("bias"));
      lay_out_bias(t.bias, s_.bias_rows);
    }
    if (s_.has_alibi) t.slopes = operand("slopes", Type::FLOAT, {1, s_.num_heads, 1, 1});
    if (s_.has_sinks) t.sinks = operand("sinks", Type::FLOAT, {1, s_.num_heads, 1, 1});
    if (s_.dropout_rate > 0) {
      t.seed = operand("seed", Type::INT64, {1, 1, 1, 1});
      t.seed_offset = operand("seed_offset", Type::INT64, {1, 1, 1, 1});
    }
    return t;
  }

  static void pack(std::initializer_list<std::pair<Tensor, Tensor>> tensors_and_offsets) {
    for (const auto& [tensor, offsets] : tensors_and_offsets) {
      if (offsets) tensor->set_ragged_offset(offsets);
    }
  }

  // What forward and backward say the same way.
  template <typename Attributes>
  void apply(Attributes& attributes, const OptionTensors& t) {
    attributes.set_attn_scale(s_.scale);
    if (t.bias) attributes.set_bias(t.bias);
    if (t.seed) attributes.set_dropout(s_.dropout_rate, t.seed, t.seed_offset);
    if (t.lengths_q) attributes.set_seq_len_q(t.lengths_q).set_seq_len_kv(t.lengths_kv);
    if (ScoreMod::is_needed_by(s_)) {
      score_mod_ = std::make_shared<ScoreMod>(s_, t.lengths_q, t.lengths_kv, t.slopes);
      attributes.set_score_mod([mod = score_mod_](auto graph, auto score) {
        return mod->forward(graph, score);
      });
      return;
    }
    attributes.set_padding_mask(s_.has_lengths);
    if (!s_.has_band()) return;
    attributes.set_diagonal_alignment(s_.bottom_right ? fe::DiagonalAlignment_t::BOTTOM_RIGHT
                                                      : fe::DiagonalAlignment_t::TOP_LEFT);
    // cuDNN's left bound is the first column that is not seen.
    if (s_.window_left >= 0) attributes.set_diagonal_band_left_bound(s_.window_left + 1);
    if (s_.window_right >= 0) attributes.set_diagonal_band_right_bound(s_.window_right);
  }

  const SdpaSpec& s_;
  const fe::DataType_t dtype_;
  const Side queries_, keys_;
  std::shared_ptr<fe::graph::Graph> graph_;
  std::shared_ptr<ScoreMod> score_mod_;
  std::vector<int64_t> buffer_bytes_;
};

Status check(const SdpaSpec& s) {
  const auto wrong = [&](const std::string& what) {
    return Status{Code::kWrongCall, what + " in " + s.key()};
  };
  if (s.dtype != "float16" && s.dtype != "bfloat16") {
    return wrong("expected dtype float16 or bfloat16, got " + s.dtype);
  }
  for (int64_t extent : {s.batch, s.num_heads, s.num_kv_heads, s.seq_len_q, s.seq_len_kv,
                         s.head_dim, s.head_dim_v}) {
    if (extent < 1)
      return wrong("expected every extent to be positive, got " + std::to_string(extent));
  }
  if (s.num_heads % s.num_kv_heads != 0)
    return wrong("num_heads is not a multiple of num_kv_heads");
  // Strides must be multiples of 16 bytes: github.com/NVIDIA/cudnn-frontend/issues/1571.
  if (s.head_dim % 8 != 0 || s.head_dim_v % 8 != 0)
    return wrong("a head dim is not a multiple of 8");
  if (s.is_packed() != (s.packed_rows_kv > 0) || (s.is_packed() && !s.has_lengths))
    return wrong("packed arrays need rows on both sides and lengths");
  return {};
}

}  // namespace

Result<SdpaGraph> make_graph(const SdpaSpec& spec, DeviceFacts device) {
  ATTN_RETURN_IF_ERROR(check(spec));
  GraphBuilder builder(spec, device);
  spec.backward ? builder.backward() : builder.forward();
  return builder.finish();
}

}  // namespace attn_dispatch
