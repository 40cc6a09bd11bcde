// Serves aiter_api.h on a CPU: computes what AITER computes, row by row, with the pointers, strides
// and layouts of the call, and refuses what AITER cannot do.
//
// First it fills results, softmax_d and the scratch of splits with NaN, so that rows which a real
// kernel leaves unwritten show. It does not touch dq_acc, nor what a kernel adds to or writes only
// in part: the caller must zero those.
#include <string.h>

#include "checks.h"
#include "computations.h"
#include "hooks.h"

namespace attn_emulator {
namespace {

void poison(const Array& array) {
  const Axis* a = array.axes;
  auto* start = static_cast<char*>(const_cast<void*>(array.start));
  for (int64_t i = 0; i < a[0].size; ++i) {
    for (int64_t j = 0; j < a[1].size; ++j) {
      for (int64_t k = 0; k < a[2].size; ++k) {
        const int64_t at = i * a[0].stride + j * a[1].stride + k * a[2].stride;
        for (int64_t part = 0; part < a[4].size; ++part) {
          memset(start + (at + part * a[4].stride) * array.element_bytes, 0xff,
                 a[3].size * array.element_bytes);
        }
      }
    }
  }
}

void poison(const std::vector<Array>& arrays) {
  for (const Array& array : arrays) {
    if (array.access == Access::kWritten && !array.is_empty()) poison(array);
  }
}

// Calls `function(sequence, head)` for each pair of them.
template <typename Function>
void for_each_head(const AttnAiterCall& call, Function function) {
  for (int32_t i = 0; i < call.batch; ++i) {
    const Sequence s = sequence_of(call, i);
    for (int32_t head = 0; head < call.num_heads; ++head) function(s, head);
  }
}

}  // namespace

std::string run(const AttnAiterForward& forward, void*) {
  if (std::string why = refusal(forward); !why.empty()) return why;
  const std::vector<Array> arrays = arrays_of(forward);
  if (std::string why = misfit(arrays); !why.empty()) return why;
  if (std::string why = wrong_sequences(forward.call); !why.empty()) return why;
  poison(arrays);
  for_each_head(forward.call, [&](const Sequence& s, int32_t head) {
    for (int32_t row = 0; row < s.len_q; ++row) forward_row(forward, s, head, row);
  });
  return "";
}

std::string run(const AttnAiterBackward& backward, void*) {
  const std::string on = arch();
  if (std::string why = refusal(backward, on); !why.empty()) return why;
  const bool direct = is_direct(backward, on);
  const std::vector<Array> arrays = arrays_of(backward, direct);
  if (std::string why = misfit(arrays); !why.empty()) return why;
  if (std::string why = wrong_sequences(backward.call); !why.empty()) return why;
  poison(arrays);
  for_each_head(backward.call, [&](const Sequence& s, int32_t head) {
    for (int32_t row = 0; row < s.len_q; ++row) softmax_d_row(backward, s, head, row);
    for (int32_t row = 0; row < s.len_q; ++row) dq_row(backward, direct, s, head, row);
    for (int32_t col = 0; col < s.len_k; ++col) key_row(backward, s, head, col);
  });
  if (direct) return "";
  for_each_head(backward.call, [&](const Sequence& s, int32_t head) {
    for (int32_t row = 0; row < s.len_q; ++row) convert_dq_row(backward, s, head, row);
  });
  return "";
}

std::string run(const AttnAiterSplitKv& split, void*) {
  if (std::string why = refusal(split); !why.empty()) return why;
  const std::vector<Array> arrays = arrays_of(split);
  if (std::string why = misfit(arrays); !why.empty()) return why;
  if (std::string why = wrong_pages(split); !why.empty()) return why;
  poison(arrays);
  for (int32_t i = 0; i < split.call.batch; ++i) {
    const Sequence s = row_of(split, i);
    for (int32_t head = 0; head < split.call.num_heads; ++head) {
      for (int32_t row = 0; row < s.len_q; ++row) {
        for (int32_t part = 0; part < split.num_splits; ++part) {
          split_row(split, s, head, row, part);
        }
        combine_row(split, s, head, row);
      }
    }
  }
  return "";
}

}  // namespace attn_emulator
