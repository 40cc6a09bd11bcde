// What cuDNN has no attribute for, as a subgraph over the scores: the soft cap, and ALiBi with the
// caller's own slopes, and a score_mod. Where there is one, cuDNN wants all masks to be part of it.
#pragma once

#include <cudnn_frontend.h>

#include <memory>
#include <optional>

#include "score_program.h"
#include "spec.h"

namespace attn_dispatch {
namespace fe = cudnn_frontend;

class ScoreMod {
 public:
  using Graph = std::shared_ptr<fe::graph::Graph>;
  using Tensor = std::shared_ptr<fe::graph::Tensor_attributes>;

  static bool is_needed_by(const SdpaSpec& spec) {
    return spec.soft_cap > 0 || spec.has_alibi || spec.has_score_program();
  }

  // Tensors are null where the spec has none of them. It must outlive the building of the graph.
  ScoreMod(const SdpaSpec& spec, Tensor lengths_q, Tensor lengths_kv, Tensor slopes,
           const std::vector<Tensor>& arrays)
      : spec_(spec),
        lengths_q_(lengths_q),
        lengths_kv_(lengths_kv),
        slopes_(slopes),
        program_(arrays) {}

  Tensor forward(const Graph& graph, Tensor score) {
    namespace mods = fe::graph::attn::score_modifiers;
    if (spec_.soft_cap > 0) score = soft_cap(graph, score);
    if (spec_.has_score_program()) score = program_.forward(graph, spec_.score_nodes, score);
    if (slopes_) score = alibi(graph, score);
    if (lengths_q_) score = mods::padding_mask(graph, score, lengths_kv_, lengths_q_);
    if (!spec_.has_band()) return score;
    std::optional<int64_t> left, right;
    if (spec_.window_left >= 0) left = spec_.window_left + 1;
    if (spec_.window_right >= 0) right = spec_.window_right;
    const auto alignment = spec_.bottom_right ? fe::DiagonalAlignment_t::BOTTOM_RIGHT
                                              : fe::DiagonalAlignment_t::TOP_LEFT;
    return mods::sliding_window_mask(graph, score, alignment, left, right, spec_.seq_len_q,
                                     spec_.seq_len_kv, lengths_q_, lengths_kv_,
                                     /*cu_s_q_ptr=*/nullptr, /*cu_s_kv_ptr=*/nullptr);
  }

  // From the gradient of what forward returned to that of what it was given.
  Tensor backward(const Graph& graph, Tensor grad) {
    if (!spec_.gradient_nodes.empty()) {
      grad = program_.backward(graph, spec_.gradient_nodes, grad);
    }
    return bent_ ? soft_cap_slope(graph, grad) : grad;
  }

 private:
  using Pointwise = fe::graph::Pointwise_attributes;
  using Mode = fe::PointwiseMode_t;

  static Tensor scalar(float value) {
    return std::make_shared<fe::graph::Tensor_attributes>(value);
  }

  // cap * tanh(score / cap)
  Tensor soft_cap(const Graph& graph, const Tensor& score) {
    const Tensor cap = scalar(spec_.soft_cap);
    bent_ = graph->pointwise(score, cap, op("soft_cap_of", Mode::DIV));
    bent_ = graph->pointwise(bent_, op("soft_cap_tanh", Mode::TANH_FWD));
    return graph->pointwise(bent_, cap, op("soft_cap", Mode::MUL));
  }

  // grad * (1 - tanh²): sm80 and sm120 have no kernel for TANH_BWD.
  Tensor soft_cap_slope(const Graph& graph, const Tensor& grad) const {
    const Tensor once = graph->pointwise(grad, bent_, op("soft_cap_once", Mode::MUL));
    const Tensor twice = graph->pointwise(once, bent_, op("soft_cap_twice", Mode::MUL));
    return graph->pointwise(grad, twice, op("soft_cap_slope", Mode::SUB));
  }

  // score - slope * |row + offset - column|
  Tensor alibi(const Graph& graph, const Tensor& score) const {
    const auto index = [&](const char* name, int64_t axis) {
      return integers(graph->pointwise(score, integer_op(name, Mode::GEN_INDEX).set_axis(axis)));
    };
    Tensor distance = integers(graph->pointwise(index("alibi_column", 3), index("alibi_row", 2),
                                                integer_op("alibi_distance", Mode::SUB)));
    if (spec_.alibi_offset != 0) {
      const auto offset = static_cast<int32_t>(spec_.alibi_offset);
      distance = integers(graph->pointwise(distance,
                                           std::make_shared<fe::graph::Tensor_attributes>(offset),
                                           integer_op("alibi_offset", Mode::SUB)));
    }
    // Where no key beyond the diagonal is seen all distances are negative; as in cuDNN's own ALiBi.
    const bool is_one_sided = spec_.window_right >= 0 && spec_.window_right <= spec_.alibi_offset;
    if (is_one_sided) return add(graph, score, scaled(graph, distance, slopes_));
    distance = scaled(graph, distance, scalar(-1));
    distance = graph->pointwise(distance, op("alibi_abs", Mode::ABS));
    distance = scaled(graph, distance, scalar(-1));
    return add(graph, score, scaled(graph, distance, slopes_));
  }

  static Tensor scaled(const Graph& graph, const Tensor& x, const Tensor& factor) {
    return graph->pointwise(x, factor, op("alibi_scaled", Mode::MUL));
  }

  static Tensor add(const Graph& graph, const Tensor& x, const Tensor& y) {
    return graph->pointwise(x, y, op("alibi", Mode::ADD));
  }

  static Pointwise op(const char* name, Mode mode) {
    return Pointwise().set_name(name).set_mode(mode);
  }

  static Pointwise integer_op(const char* name, Mode mode) {
    return op(name, mode).set_compute_data_type(fe::DataType_t::INT32);
  }

  static Tensor integers(Tensor tensor) {
    tensor->set_data_type(fe::DataType_t::INT32);
    return tensor;
  }

  const SdpaSpec& spec_;
  Tensor lengths_q_, lengths_kv_, slopes_;
  ScoreProgram program_;
  Tensor bent_;  // tanh of the score over the cap, in the graph that was built last
};

}  // namespace attn_dispatch
