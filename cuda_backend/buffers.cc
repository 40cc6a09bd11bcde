#include "buffers.h"

namespace attn_dispatch {
namespace {

struct Factor {
  const char* name;
  int64_t value;
};
using Factors = std::vector<Factor>;

// More pairs or elements than cuDNN could count in 64 bits, with room for what it multiplies by.
constexpr int64_t kMostElements = int64_t{1} << 60;

std::string shown(const Factors& factors) {
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

class Counter {
 public:
  explicit Counter(const SdpaSpec& spec) : s_(spec) {}

  void add(const std::string& name, int64_t element_bytes, const Factors& factors) {
    int64_t bytes = element_bytes;
    if (!multiply(factors, &bytes) || __builtin_add_overflow(sum_, bytes, &sum_) ||
        sum_ > kMostBytes) {
      refuse(name + ": expected buffers of at most " + std::to_string(kMostBytes) +
             " bytes in all, got " + std::to_string(element_bytes) + " bytes * " + shown(factors));
      sum_ = 0;
    }
    found_.all.push_back({name, bytes});
  }

  // What is not in memory as a whole, but counted.
  void count(const char* what, const Factors& factors) {
    int64_t elements = 1;
    if (!multiply(factors, &elements) || elements > kMostElements) {
      refuse(std::string(what) + ": expected at most " + std::to_string(kMostElements) + ", got " +
             shown(factors));
    }
  }

  void end_flags() { found_.flags = found_.all.size(); }
  void end_operands() { found_.operands = found_.all.size(); }

  Result<CallBuffers> take() {
    if (!status_.ok()) return status_;
    return std::move(found_);
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
  CallBuffers found_;
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
  Counter c(s);
  const Factors heads = {{"num_heads", s.num_heads}}, kv_heads = {{"num_kv_heads", s.num_kv_heads}};
  const Factors dim = {{"head_dim", s.head_dim}}, dim_v = {{"head_dim_v", s.head_dim_v}};
  const Factors batch = {{"batch", s.batch}}, one = {};
  const Factors lengths = {{"seq_len_q", s.seq_len_q}, {"seq_len_kv", s.seq_len_kv}};
  const Factors scores = with(with(batch, heads), lengths);
  const Factors queries = with(c.rows_q(), heads);
  const Factors keys = with(
      s.is_paged() ? Factors{{"num_pages", s.num_pages}, {"page_size", s.page_size}} : c.rows_kv(),
      kv_heads);
  const int64_t element = bytes_of(s.dtype);
  c.count("scores", scores);
  // As if every sequence were the longest: strides of packed arrays, and of keys in pages.
  for (const Factors& d : {dim, dim_v}) {
    c.count("elements of queries", with(with(batch, {{"seq_len_q", s.seq_len_q}}), with(heads, d)));
    c.count("elements of keys",
            with(with(batch, {{"seq_len_kv", s.seq_len_kv}}), with(kv_heads, d)));
  }

  if (s.clears_rows) {
    c.add("flags_q", 1, s.head_rows_q ? queries : c.rows_q());
    if (s.backward) c.add("flags_kv", 1, s.head_rows_kv ? keys : c.rows_kv());
  }
  c.end_flags();

  c.add("query", element, with(queries, dim));
  c.add("key", element, with(keys, dim));
  c.add("value", element, with(keys, dim_v));
  if (s.backward) {
    c.add("out", element, with(queries, dim_v));
    c.add("lse", 4, queries);
    c.add("out_grad", element, with(queries, dim_v));
  }
  if (s.has_lengths) {
    c.add("lengths_q", 4, batch);
    c.add("lengths_kv", 4, batch);
  }
  if (s.is_packed()) {
    const Factors offsets = {{"batch + 1", s.batch + 1}};
    for (const char* name : {"offsets_query", "offsets_key", "offsets_value", "offsets_out"}) {
      c.add(name, 4, offsets);
    }
    if (s.has_statistics()) c.add("offsets_lse", 4, offsets);
  }
  if (s.is_paged()) {
    const Factors pages = with(batch, {{"pages of seq_len_kv", s.most_pages()}});
    c.add("page_table", 4, pages);
    if (s.has_value_table) c.add("value_table", 4, pages);
  }
  if (s.has_bias()) {
    c.add("bias", bytes_of(s.bias_dtype),
          {{"bias_batch", s.bias_batch},
           {"bias_heads", s.bias_heads},
           {"bias_rows", s.bias_rows},
           {"seq_len_kv rounded up", s.bias_row()}});
  }
  for (size_t i = 0; i < arrays.value.size(); ++i) {
    const auto& e = arrays.value[i].extents;
    c.add('o' + std::to_string(i), 4,
          {{"batch", e[0]}, {"heads", e[1]}, {"rows", e[2]}, {"keys", e[3]}});
  }
  if (s.has_sinks) c.add("sinks", 4, heads);
  if (s.dropout_rate > 0) {
    c.add("seed", 8, one);
    c.add("seed_offset", 8, one);
  }
  c.end_operands();

  if (s.backward) {
    c.add("dq", element, with(queries, dim));
    c.add("dk", element, with(keys, dim));
    c.add("dv", element, with(keys, dim_v));
    if (s.needs_dbias) {
      c.add("dbias", element,
            with({{"bias_batch", s.bias_batch}, {"bias_heads", s.bias_heads}}, lengths));
    }
    return c.take();
  }
  c.add("out", element, with(queries, dim_v));
  if (s.needs_lse) c.add("lse", 4, queries);
  if (s.needs_max) {
    c.add("row_max", 4, queries);
    c.add("row_sum", 4, queries);
  }
  if (s.needs_keep) c.add("keep", 4, scores);
  return c.take();
}

}  // namespace attn_dispatch
