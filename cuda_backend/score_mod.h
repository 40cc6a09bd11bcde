// The subgraph over the scores for what cuDNN has no attribute for: a soft cap, ALiBi with the
// caller's slopes, score_mod and mask_mod. Where there is one, cuDNN requires that all masks are
// part of it.
#pragma once

#include <cudnn_frontend.h>

#include <memory>
#include <optional>
#include <vector>

#include "score_graph.h"
#include "spec.h"

namespace attn_dispatch {
namespace fe = cudnn_frontend;

class ScoreMod {
 public:
  using Graph = std::shared_ptr<fe::graph::Graph>;
  using Tensor = std::shared_ptr<fe::graph::Tensor_attributes>;

  // Tensors that the spec does not have are null. The object must live until the graph is built.
  ScoreMod(const SdpaSpec& spec, ScoreProgram program, Tensor lengths_q, Tensor lengths_kv,
           const std::vector<Tensor>& arrays)
      : spec_(spec),
        lengths_q_(lengths_q),
        lengths_kv_(lengths_kv),
        nodes_(std::move(program), arrays) {}

  Tensor forward(const Graph& graph, Tensor score) {
    namespace mods = fe::graph::attn::score_modifiers;
    score = nodes_.forward(graph, score);
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

  // Returns the gradient of forward's argument, given that of its result.
  Tensor backward(const Graph& graph, Tensor grad) { return nodes_.backward(graph, grad); }

 private:
  const SdpaSpec& spec_;
  Tensor lengths_q_, lengths_kv_;
  ScoreGraph nodes_;
};

}  // namespace attn_dispatch
