// Makes the tensors of one call, with the uids of the custom call's buffers.
#pragma once

#include <cudnn_frontend.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "buffers.h"
#include "score_program.h"
#include "spec.h"

namespace attn_dispatch {
namespace fe = cudnn_frontend;

using Tensor = std::shared_ptr<fe::graph::Tensor_attributes>;

// The optional operands of forward and backward; null where the spec has none of them.
struct OptionTensors {
  Tensor lengths_q, lengths_kv;
  Tensor offsets_query, offsets_key, offsets_value, offsets_out, offsets_lse;
  Tensor page_table, value_table;  // the same tensor, unless has_value_table
  Tensor bias, sinks, seed, seed_offset;
  std::vector<Tensor> node_arrays;
};

// Adds tensors to a graph, each for one buffer of the call. cuDNN's dims are always heads before
// lengths; the strides say in which order they are in memory.
class CallTensors {
 public:
  using Dims = std::vector<int64_t>;

  // The queries or the keys. `rows` counts all rows, packed or not. `head_rows` counts the
  // contiguous rows of a head; it is 0 where the heads of a row are contiguous.
  struct Side {
    int64_t heads, length, rows, head_rows;

    // From head to head, and from row to row, in elements.
    int64_t head_stride(int64_t dim) const { return head_rows ? head_rows * dim : dim; }
    int64_t row_stride(int64_t dim) const { return head_rows ? dim : heads * dim; }
  };

  CallTensors(const SdpaSpec& spec, const CallBuffers& buffers, fe::graph::Graph& graph)
      : queries{spec.num_heads, spec.seq_len_q, spec.rows_q(), spec.head_rows_q},
        keys{spec.num_kv_heads, spec.seq_len_kv, spec.rows_kv(), spec.head_rows_kv},
        dtype(type_of(spec.dtype)),
        s_(spec),
        buffers_(buffers),
        graph_(graph) {}

  const Side queries, keys;
  const fe::DataType_t dtype;

  Tensor rows_operand(const char* name, const Side& side, int64_t dim) {
    Tensor tensor = graph_.tensor(Tensor_attributes().set_name(name));
    lay_out_rows(name, tensor, side, dim);
    return tensor;
  }

  // Key or value: in pages [num_pages, page_size, heads, dim], or with heads before the page's
  // keys; otherwise rows.
  Tensor keys_operand(const char* name, int64_t dim) {
    if (!s_.is_paged()) return rows_operand(name, keys, dim);
    Tensor tensor = graph_.tensor(Tensor_attributes().set_name(name));
    tensor->set_dim({s_.num_pages, keys.heads, s_.page_size, dim})
        .set_stride(
            {s_.page_size * keys.heads * dim, keys.head_stride(dim), keys.row_stride(dim), 1});
    assign_uid(name, tensor);
    return tensor;
  }

  void rows_result(const char* name, const Tensor& tensor, const Side& side, int64_t dim,
                   const Tensor& offsets) {
    tensor->set_output(true);
    lay_out_rows(name, tensor, side, dim);
    if (offsets) tensor->set_ragged_offset(offsets);
  }

  // float32, one number per query row and head.
  Tensor lse_operand() {
    Tensor tensor = graph_.tensor(Tensor_attributes().set_name("lse"));
    lay_out_lse("lse", tensor);
    return tensor;
  }

  void lse_result(const char* name, const Tensor& tensor, const Tensor& offsets) {
    tensor->set_output(true);
    lay_out_lse(name, tensor);
    if (offsets) tensor->set_ragged_offset(offsets);
  }

  void result(const char* name, const Tensor& tensor, fe::DataType_t type, const Dims& dims) {
    tensor->set_output(true).set_data_type(type).set_dim(dims).set_stride(contiguous(dims));
    assign_uid(name, tensor);
  }

  OptionTensors option_operands(const std::vector<NodeArray>& arrays) {
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
    if (s_.is_paged()) {
      const Dims dims = {s_.batch, 1, s_.most_pages(), 1};
      t.page_table = operand("page_table", Type::INT32, dims);
      t.value_table = s_.has_value_table ? operand("value_table", Type::INT32, dims) : t.page_table;
    }
    if (s_.has_bias()) {
      t.bias = graph_.tensor(Tensor_attributes().set_name("bias"));
      lay_out_bias(t.bias, s_.bias_rows);
    }
    for (const NodeArray& array : arrays) {
      const std::string name = 'o' + std::to_string(t.node_arrays.size());
      const auto& e = array.extents;
      const auto type = array.kind == 'f' ? Type::FLOAT : Type::INT32;
      t.node_arrays.push_back(operand(name, type, {e[0], e[1], e[2], e[3]}));
    }
    if (s_.has_sinks) t.sinks = operand("sinks", Type::FLOAT, {1, s_.num_heads, 1, 1});
    if (s_.dropout_rate > 0) {
      t.seed = operand("seed", Type::INT64, {1, 1, 1, 1});
      t.seed_offset = operand("seed_offset", Type::INT64, {1, 1, 1, 1});
    }
    return t;
  }

  // Whether every buffer of the graph has a tensor.
  bool has_all() const { return assigned_ == buffers_.of_graph(); }

  static Dims contiguous(const Dims& dims) {
    Dims strides(dims.size(), 1);
    for (size_t i = dims.size() - 1; i > 0; --i) strides[i - 1] = strides[i] * dims[i];
    return strides;
  }

 private:
  using Tensor_attributes = fe::graph::Tensor_attributes;

  static fe::DataType_t type_of(const Text& dtype) {
    if (dtype == "float16") return fe::DataType_t::HALF;
    return dtype == "bfloat16" ? fe::DataType_t::BFLOAT16 : fe::DataType_t::FLOAT;
  }

  // Gives a tensor the uid of the buffer with this name.
  void assign_uid(const std::string& name, const Tensor& tensor) {
    const int64_t uid = buffers_.uid(name);
    tensor->set_uid(uid);
    assigned_ += uid > 0;
  }

  Tensor operand(const std::string& name, fe::DataType_t type, const Dims& dims) {
    Tensor tensor = graph_.tensor(
        Tensor_attributes().set_name(name).set_dim(dims).set_stride(contiguous(dims)));
    tensor->set_data_type(type);
    assign_uid(name, tensor);
    return tensor;
  }

  // In memory [batch, length, heads, dim], or with heads first.
  void lay_out_rows(const char* name, const Tensor& tensor, const Side& side, int64_t dim) {
    tensor->set_dim({s_.batch, side.heads, side.length, dim})
        .set_stride(
            {side.length * side.heads * dim, side.head_stride(dim), side.row_stride(dim), 1});
    assign_uid(name, tensor);
  }

  // float32 [B, N, T], packed [rows, N].
  void lay_out_lse(const char* name, const Tensor& tensor) {
    const int64_t n = s_.num_heads, t = s_.seq_len_q;
    tensor->set_data_type(fe::DataType_t::FLOAT).set_dim({s_.batch, n, t, 1});
    tensor->set_stride(s_.is_packed() ? Dims{t * n, 1, n, 1} : Dims{n * t, t, 1, 1});
    assign_uid(name, tensor);
  }

  // A bias with one row for all queries has a stride of 0 between rows.
  void lay_out_bias(const Tensor& tensor, int64_t rows) {
    const auto type = type_of(s_.bias_dtype);
    const int64_t row = s_.bias_row(), head = rows * row;
    tensor->set_data_type(type)
        .set_dim({s_.bias_batch, s_.bias_heads, s_.seq_len_q, s_.seq_len_kv})
        .set_stride({s_.bias_heads * head, head, rows == 1 ? 0 : row, 1});
    assign_uid("bias", tensor);
  }

  const SdpaSpec& s_;
  const CallBuffers& buffers_;
  fe::graph::Graph& graph_;
  size_t assigned_ = 0;
};

}  // namespace attn_dispatch
