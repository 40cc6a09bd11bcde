#include "graph.h"

#include <cudnn_frontend.h>

namespace attn_dispatch {
namespace fe = cudnn_frontend;
using Tensor = std::shared_ptr<fe::graph::Tensor_attributes>;

namespace {

// Adds the call's tensors one after the other, numbering them in buffer order.
class GraphBuilder {
 public:
  GraphBuilder(const SdpaSpec& spec, DeviceFacts device)
      : spec_(spec), graph_(std::make_shared<fe::graph::Graph>()) {
    // Before any node is added: each copies what it finds.
    graph_->set_sm_version(device.sm).set_sm_count(device.sm_count);
    graph_
        ->set_io_data_type(spec.dtype == "float16" ? fe::DataType_t::HALF
                                                   : fe::DataType_t::BFLOAT16)
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT);
  }

  // An operand laid out [batch, length, heads, dim], which cuDNN sees as [batch, heads, length,
  // dim].
  Tensor operand(const char* name, int64_t heads, int64_t length, int64_t dim) {
    auto attributes = fe::graph::Tensor_attributes().set_name(name);
    return graph_->tensor(attributes.set_dim({spec_.batch, heads, length, dim})
                              .set_stride(bshd_strides(heads, length, dim))
                              .set_uid(next_uid(spec_.batch * heads * length * dim * 2)));
  }

  Tensor lse_operand() {
    return graph_->tensor(fe::graph::Tensor_attributes()
                              .set_name("lse")
                              .set_dim(lse_dims())
                              .set_stride(lse_strides())
                              .set_data_type(fe::DataType_t::FLOAT)
                              .set_uid(next_uid(lse_bytes())));
  }

  Tensor lengths_operand(const char* name) {
    return graph_->tensor(fe::graph::Tensor_attributes()
                              .set_name(name)
                              .set_dim({spec_.batch, 1, 1, 1})
                              .set_stride({1, 1, 1, 1})
                              .set_data_type(fe::DataType_t::INT32)
                              .set_uid(next_uid(spec_.batch * 4)));
  }

  void result(const Tensor& tensor, int64_t heads, int64_t length, int64_t dim) {
    tensor->set_output(true)
        .set_dim({spec_.batch, heads, length, dim})
        .set_stride(bshd_strides(heads, length, dim))
        .set_uid(next_uid(spec_.batch * heads * length * dim * 2));
  }

  void lse_result(const Tensor& tensor) {
    tensor->set_output(true)
        .set_dim(lse_dims())
        .set_stride(lse_strides())
        .set_data_type(fe::DataType_t::FLOAT)
        .set_uid(next_uid(lse_bytes()));
  }

  // What forward and backward say the same way.
  template <typename Attributes>
  void apply_mask(Attributes& attributes, const Tensor& lengths_q, const Tensor& lengths_kv) const {
    attributes.set_attn_scale(spec_.scale);
    if (spec_.is_causal) {
      attributes
          .set_diagonal_alignment(spec_.bottom_right ? fe::DiagonalAlignment_t::BOTTOM_RIGHT
                                                     : fe::DiagonalAlignment_t::TOP_LEFT)
          .set_diagonal_band_right_bound(0);
    }
    if (spec_.full_lengths) {
      attributes.set_padding_mask(true).set_seq_len_q(lengths_q).set_seq_len_kv(lengths_kv);
    }
  }

  void forward() {
    const auto& s = spec_;
    Tensor q = operand("query", s.num_heads, s.seq_len_q, s.head_dim);
    Tensor k = operand("key", s.num_kv_heads, s.seq_len_kv, s.head_dim);
    Tensor v = operand("value", s.num_kv_heads, s.seq_len_kv, s.head_dim_v);
    Tensor lengths_q = s.full_lengths ? lengths_operand("lengths_q") : nullptr;
    Tensor lengths_kv = s.full_lengths ? lengths_operand("lengths_kv") : nullptr;
    auto attributes = fe::graph::SDPA_attributes().set_name("sdpa").set_generate_stats(s.needs_lse);
    apply_mask(attributes, lengths_q, lengths_kv);
    auto [out, lse] = graph_->sdpa(q, k, v, attributes);
    result(out, s.num_heads, s.seq_len_q, s.head_dim_v);
    if (s.needs_lse) lse_result(lse);
  }

  void backward() {
    const auto& s = spec_;
    Tensor q = operand("query", s.num_heads, s.seq_len_q, s.head_dim);
    Tensor k = operand("key", s.num_kv_heads, s.seq_len_kv, s.head_dim);
    Tensor v = operand("value", s.num_kv_heads, s.seq_len_kv, s.head_dim_v);
    Tensor out = operand("out", s.num_heads, s.seq_len_q, s.head_dim_v);
    Tensor lse = lse_operand();
    Tensor out_grad = operand("out_grad", s.num_heads, s.seq_len_q, s.head_dim_v);
    Tensor lengths_q = s.full_lengths ? lengths_operand("lengths_q") : nullptr;
    Tensor lengths_kv = s.full_lengths ? lengths_operand("lengths_kv") : nullptr;
    auto attributes = fe::graph::SDPA_backward_attributes().set_name("sdpa_backward");
    apply_mask(attributes, lengths_q, lengths_kv);
    auto [dq, dk, dv] = graph_->sdpa_backward(q, k, v, out, out_grad, lse, attributes);
    result(dq, s.num_heads, s.seq_len_q, s.head_dim);
    result(dk, s.num_kv_heads, s.seq_len_kv, s.head_dim);
    result(dv, s.num_kv_heads, s.seq_len_kv, s.head_dim_v);
  }

  SdpaGraph finish() { return {std::move(graph_), std::move(buffer_bytes_)}; }

 private:
  int64_t next_uid(int64_t bytes) {
    buffer_bytes_.push_back(bytes);
    return static_cast<int64_t>(buffer_bytes_.size());
  }

  static std::vector<int64_t> bshd_strides(int64_t heads, int64_t length, int64_t dim) {
    return {length * heads * dim, dim, heads * dim, 1};
  }

  std::vector<int64_t> lse_dims() const {
    return {spec_.batch, spec_.num_heads, spec_.seq_len_q, 1};
  }

  std::vector<int64_t> lse_strides() const {
    return {spec_.num_heads * spec_.seq_len_q, spec_.seq_len_q, 1, 1};
  }

  int64_t lse_bytes() const { return spec_.batch * spec_.num_heads * spec_.seq_len_q * 4; }

  const SdpaSpec& spec_;
  std::shared_ptr<fe::graph::Graph> graph_;
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
