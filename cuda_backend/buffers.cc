#include "buffers.h"

namespace attn_dispatch {
namespace {

// One factor of a size, with its name for messages.
struct Factor {
  const char* name;
  int64_t value;
};
using Factors = std::vector<Factor>;

// The most scores or elements: cuDNN multiplies them further, in 64 bits.
constexpr int64_t kMostElements = int64_t{1} << 60;

std::string to_text(const Factors& factors) {
  std::string text;
  for (const Factor& factor : factors) {
    text +=
        (text.empty() ? "" : " * ") + std::string(factor.name) + '=' + std::to_string(factor.value);
  }
  return text;
}

bool multiply(const Factors& factors, int64_t* product) {
  for (const Factor& factor : factors) {
    if (__builtin_mul_overflow(*product, factor.value, product)) return false;
  }
  return true;
}

class BufferList {
 public:
  explicit BufferList(const SdpaSpec& spec) : s_(spec) {}

  void add(const std::string& name, int64_t element_bytes, const Factors& factors) {
    int64_t bytes = element_bytes;
    if (!multiply(factors, &bytes) || __builtin_add_overflow(sum_, bytes, &sum_) ||
        sum_ > kMostBytes) {
      refuse(name + ": expected buffers of at most " + std::to_string(kMostBytes) +
             " bytes in all, got " + std::to_string(element_bytes) + " bytes * " +
             to_text(factors));
      sum_ = 0;
    }
    buffers_.all.push_back({name, bytes});
  }

  // Limits the product of factors that no buffer has, but cuDNN multiplies.
  void limit(const char* what, const Factors& factors) {
    int64_t elements = 1;
    if (!multiply(factors, &elements) || elements > kMostElements) {
      refuse(std::string(what) + ": expected at most " + std::to_string(kMostElements) + ", got " +
             to_text(factors));
    }
  }

  void end_flags() { buffers_.flags = buffers_.all.size(); }
  void end_operands() { buffers_.operands = buffers_.all.size(); }

  Result<CallBuffers> finish() {
    if (!status_.ok()) return status_;
    return std::move(buffers_);
  }

  Factors rows_q() const {
    if (s_.is_packed()) return {{"packed_rows_q", s_.packed_rows_q}};
    return {{"batch", s_.batch}, {"seq_len_q", s_.seq_len_q}};
  }

  Factors rows_kv() const {
    if (s_.is_packed()) return {{"packed_rows_kv", s_.packed_rows_kv}};
    return {{"batch", s_.batch}, {"seq_len_kv", s_.seq_len_kv}};
  }

 private:
  void refuse(std::string message) {
    if (status_.ok()) status_ = {Code::kWrongCall, std::move(message)};
  }

  const SdpaSpec& s_;
  CallBuffers buffers_;
  int64_t sum_ = 0;
  Status status_;
};

Factors with(Factors factors, const Factors& more) {
  factors.insert(factors.end(), more.begin(), more.end());
  return factors;
}

int64_t bytes_of(const Text& dtype) { return dtype == "float32" ? 4 : 2; }

}  // namespace

int64_t CallBuffers::uid(const std::string& name) const {
  for (size_t i = flags; i < all.size(); ++i) {
    if (all[i].name == name) return static_cast<int64_t>(i - flags + 1);
  }
  return 0;
}

Result<CallBuffers> buffers_of(const SdpaSpec& s) {
  const auto arrays = node_arrays_of(s);
  if (!arrays.ok()) return arrays.status;
  BufferList list(s);
  const Factors heads = {{"num_heads", s.num_heads}}, kv_heads = {{"num_kv_heads", s.num_kv_heads}};
  const Factors dim = {{"head_dim", s.head_dim}}, dim_v = {{"head_dim_v", s.head_dim_v}};
  const Factors batch = {{"batch", s.batch}}, one = {};
  const Factors lengths = {{"seq_len_q", s.seq_len_q}, {"seq_len_kv", s.seq_len_kv}};
  const Factors scores = with(with(batch, heads), lengths);
  const Factors queries = with(list.rows_q(), heads);
  const Factors keys =
      with(s.is_paged() ? Factors{{"num_pages", s.num_pages}, {"page_size", s.page_size}}
                        : list.rows_kv(),
           kv_heads);
  const int64_t element = bytes_of(s.dtype);
  list.limit("scores", scores);
  // cuDNN computes strides of packed arrays, and of keys in pages, as if every sequence were the
  // longest.
  for (const Factors& d : {dim, dim_v}) {
    list.limit("elements of queries",
               with(with(batch, {{"seq_len_q", s.seq_len_q}}), with(heads, d)));
    list.limit("elements of keys",
               with(with(batch, {{"seq_len_kv", s.seq_len_kv}}), with(kv_heads, d)));
  }

  if (s.clears_rows) {
    list.add("flags_q", 1, s.head_rows_q ? queries : list.rows_q());
    if (s.backward) list.add("flags_kv", 1, s.head_rows_kv ? keys : list.rows_kv());
  }
  list.end_flags();

  list.add("query", element, with(queries, dim));
  list.add("key", element, with(keys, dim));
  list.add("value", element, with(keys, dim_v));
  if (s.backward) {
    list.add("out", element, with(queries, dim_v));
    list.add("lse", 4, queries);
    list.add("out_grad", element, with(queries, dim_v));
  }
  if (s.has_lengths) {
    list.add("lengths_q", 4, batch);
    list.add("lengths_kv", 4, batch);
  }
  if (s.is_packed()) {
    const Factors offsets = {{"batch + 1", s.batch + 1}};
    for (const char* name : {"offsets_query", "offsets_key", "offsets_value", "offsets_out"}) {
      list.add(name, 4, offsets);
    }
    if (s.has_statistics()) list.add("offsets_lse", 4, offsets);
  }
  if (s.is_paged()) {
    const Factors pages = with(batch, {{"pages of seq_len_kv", s.most_pages()}});
    list.add("page_table", 4, pages);
    if (s.has_value_table) list.add("value_table", 4, pages);
  }
  if (s.has_bias()) {
    list.add("bias", bytes_of(s.bias_dtype),
             {{"bias_batch", s.bias_batch},
              {"bias_heads", s.bias_heads},
              {"bias_rows", s.bias_rows},
              {"seq_len_kv rounded up", s.bias_row()}});
  }
  for (size_t i = 0; i < arrays.value.size(); ++i) {
    const auto& e = arrays.value[i].extents;
    list.add('o' + std::to_string(i), 4,
             {{"batch", e[0]}, {"heads", e[1]}, {"rows", e[2]}, {"keys", e[3]}});
  }
  if (s.has_sinks) list.add("sinks", 4, heads);
  if (s.dropout_rate > 0) {
    list.add("seed", 8, one);
    list.add("seed_offset", 8, one);
  }
  list.end_operands();

  if (s.backward) {
    list.add("dq", element, with(queries, dim));
    list.add("dk", element, with(keys, dim));
    list.add("dv", element, with(keys, dim_v));
    if (s.needs_dbias) {
      list.add("dbias", element,
               with({{"bias_batch", s.bias_batch}, {"bias_heads", s.bias_heads}}, lengths));
    }
    return list.finish();
  }
  list.add("out", element, with(queries, dim_v));
  if (s.needs_lse) list.add("lse", 4, queries);
  if (s.needs_max) {
    list.add("row_max", 4, queries);
    list.add("row_sum", 4, queries);
  }
  if (s.needs_keep) list.add("keep", 4, scores);
  return list.finish();
}

}  // namespace attn_dispatch
