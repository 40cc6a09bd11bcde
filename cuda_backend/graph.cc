#include "graph.h"

#include <cudnn_frontend.h>

#include "buffers.h"
#include "call_tensors.h"
#include "score_mod.h"
#include "score_program.h"

namespace attn_dispatch {
namespace fe = cudnn_frontend;

namespace {

class GraphBuilder {
 public:
  GraphBuilder(const SdpaSpec& spec, const CallBuffers& buffers, std::vector<NodeArray> arrays,
               ScoreProgram program, DeviceFacts device)
      : s_(spec),
        arrays_(std::move(arrays)),
        program_(std::move(program)),
        graph_(std::make_shared<fe::graph::Graph>()),
        tensors_(spec, buffers, *graph_) {
    // Before any node is added: nodes copy these.
    graph_->set_sm_version(device.sm).set_sm_count(device.sm_count);
    graph_->set_io_data_type(tensors_.dtype)
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT);
  }

  void forward() {
    Tensor q = tensors_.rows_operand("query", tensors_.queries, s_.head_dim);
    Tensor k = tensors_.keys_operand("key", s_.head_dim);
    Tensor v = tensors_.keys_operand("value", s_.head_dim_v);
    const OptionTensors options = tensors_.option_operands(arrays_);
    pack({{q, options.offsets_query}, {k, options.offsets_key}, {v, options.offsets_value}});

    auto attributes =
        fe::graph::SDPA_attributes().set_name("sdpa").set_generate_stats(s_.needs_lse);
    apply(attributes, options);
    if (options.page_table) {
      attributes.set_paged_attention_k_table(options.page_table)
          .set_paged_attention_v_table(options.value_table)
          .set_paged_attention_max_seq_len_kv(static_cast<int32_t>(s_.seq_len_kv));
    }
    if (options.sinks) attributes.set_sink_token(options.sinks);
    Tensor row_max, row_sum, keep;
    if (s_.needs_max) {
      attributes.set_logit_max(row_max = new_tensor("row_max"));
      attributes.set_score_sum_exp(row_sum = new_tensor("row_sum"));
    }
    if (s_.needs_keep) {
      attributes.set_rng_dump(keep = new_tensor("keep"));
      // cudnn-frontend does not infer its shape.
      keep->set_dim(score_dims()).set_stride(CallTensors::contiguous(score_dims()));
    }
    // By itself cuDNN chooses its unified implementation, which has no engine for lengths here.
    if (score_mod_ && s_.has_lengths) {
      attributes.set_implementation(fe::AttentionImplementation_t::COMPOSITE);
    }
    auto [out, lse] = graph_->sdpa(q, k, v, attributes);
    tensors_.rows_result("out", out, tensors_.queries, s_.head_dim_v, options.offsets_out);
    if (s_.needs_lse) tensors_.lse_result("lse", lse, options.offsets_lse);
    if (s_.needs_max) {
      tensors_.lse_result("row_max", row_max, options.offsets_lse);
      tensors_.lse_result("row_sum", row_sum, options.offsets_lse);
    }
    if (s_.needs_keep) tensors_.result("keep", keep, fe::DataType_t::FLOAT, score_dims());
  }

  void backward() {
    Tensor q = tensors_.rows_operand("query", tensors_.queries, s_.head_dim);
    Tensor k = tensors_.rows_operand("key", tensors_.keys, s_.head_dim);
    Tensor v = tensors_.rows_operand("value", tensors_.keys, s_.head_dim_v);
    Tensor out = tensors_.rows_operand("out", tensors_.queries, s_.head_dim_v);
    Tensor lse = tensors_.lse_operand();
    Tensor out_grad = tensors_.rows_operand("out_grad", tensors_.queries, s_.head_dim_v);
    const OptionTensors options = tensors_.option_operands(arrays_);
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
      attributes.set_score_mod_bprop(
          [mod = score_mod_](auto graph, auto grad) { return mod->backward(graph, grad); });
    }
    if (s_.is_packed()) {
      attributes.set_max_total_seq_len_q(tensors_.queries.rows)
          .set_max_total_seq_len_kv(tensors_.keys.rows);
    }
    Tensor dbias;
    if (s_.needs_dbias) attributes.set_dbias(dbias = new_tensor("dbias"));
    auto [dq, dk, dv] = graph_->sdpa_backward(q, k, v, out, out_grad, lse, attributes);
    tensors_.rows_result("dq", dq, tensors_.queries, s_.head_dim, options.offsets_query);
    tensors_.rows_result("dk", dk, tensors_.keys, s_.head_dim, options.offsets_key);
    tensors_.rows_result("dv", dv, tensors_.keys, s_.head_dim_v, options.offsets_value);
    if (s_.needs_dbias) {
      tensors_.result("dbias", dbias, tensors_.dtype,
                      {s_.bias_batch, s_.bias_heads, s_.seq_len_q, s_.seq_len_kv});
    }
  }

  Result<std::shared_ptr<fe::graph::Graph>> finish() {
    if (tensors_.has_all()) return std::move(graph_);
    return Status{Code::kUnsupported, "a buffer of the call has no tensor in cuDNN's graph"};
  }

 private:
  using Dims = CallTensors::Dims;

  static Tensor new_tensor(const char* name) {
    auto tensor = std::make_shared<fe::graph::Tensor_attributes>();
    tensor->set_name(name);
    return tensor;
  }

  Dims score_dims() const { return {s_.batch, s_.num_heads, s_.seq_len_q, s_.seq_len_kv}; }

  static void pack(std::initializer_list<std::pair<Tensor, Tensor>> tensors_and_offsets) {
    for (const auto& [tensor, offsets] : tensors_and_offsets) {
      if (offsets) tensor->set_ragged_offset(offsets);
    }
  }

  // Sets what forward and backward share.
  template <typename Attributes>
  void apply(Attributes& attributes, const OptionTensors& t) {
    attributes.set_attn_scale(s_.scale);
    if (t.bias) attributes.set_bias(t.bias);
    if (t.seed) attributes.set_dropout(s_.dropout_rate, t.seed, t.seed_offset);
    if (t.lengths_q) attributes.set_seq_len_q(t.lengths_q).set_seq_len_kv(t.lengths_kv);
    if (s_.has_score_program()) {
      score_mod_ = std::make_shared<ScoreMod>(s_, std::move(program_), t.lengths_q, t.lengths_kv,
                                              t.node_arrays);
      attributes.set_score_mod(
          [mod = score_mod_](auto graph, auto score) { return mod->forward(graph, score); });
      return;
    }
    attributes.set_padding_mask(s_.has_lengths);
    if (!s_.has_band()) return;
    attributes.set_diagonal_alignment(s_.bottom_right ? fe::DiagonalAlignment_t::BOTTOM_RIGHT
                                                      : fe::DiagonalAlignment_t::TOP_LEFT);
    // cuDNN's left bound is the first key that is not visible.
    if (s_.window_left >= 0) attributes.set_diagonal_band_left_bound(s_.window_left + 1);
    if (s_.window_right >= 0) attributes.set_diagonal_band_right_bound(s_.window_right);
  }

  const SdpaSpec& s_;
  const std::vector<NodeArray> arrays_;
  ScoreProgram program_;
  std::shared_ptr<fe::graph::Graph> graph_;
  CallTensors tensors_;
  std::shared_ptr<ScoreMod> score_mod_;
};

}  // namespace

Result<std::shared_ptr<fe::graph::Graph>> make_graph(const SdpaSpec& spec, DeviceFacts device) {
  auto arrays = node_arrays_of(spec);
  if (!arrays.ok()) return arrays.status;
  auto program = score_program_of(spec, arrays.value);
  if (!program.ok()) return program.status;
  const auto buffers = buffers_of(spec);
  if (!buffers.ok()) return buffers.status;
  GraphBuilder builder(spec, buffers.value, std::move(arrays.value), std::move(program.value),
                       device);
  spec.backward ? builder.backward() : builder.forward();
  return builder.finish();
}

}  // namespace attn_dispatch
