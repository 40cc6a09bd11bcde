// The part of an AITER call that is the same in every execution, decoded from the custom call's
// attributes once.
#pragma once

#include <string>

#include "aiter_api.h"
#include "spec.h"
#include "status.h"

namespace attn_dispatch {

struct Attributes {
#define FIELD(type, name) type name{};
  ATTN_AITER_SPEC(FIELD)
#undef FIELD
};

// The three custom calls.
enum class Pass { kForward, kBackward, kSplitKv };

struct CallSite {
  std::string arch;
  std::string generation;  // of AITER
  AttnAiterCall call{};    // scalars only; pointers, sizes and strides come with the buffers
  bool has_gaps = false;
  bool takes_prefix_sums = false;  // of lengths where there are gaps

  float logits_soft_cap = 0;
  bool needs_lse = false;

  AttnAiterAccumulator accumulator = ATTN_AITER_SPLIT;
  bool deterministic = false;
  bool has_dbias = false;

  bool is_paged = false;
  bool heads_first_kv = false;
  int32_t value_page = 0;
  int32_t num_splits = 1;
};

// Refuses the first attribute that is out of range, an unknown word, in contradiction to another
// one, or meant for another custom call.
Result<CallSite> decode_call_site(const Attributes& attributes, Pass pass);

}  // namespace attn_dispatch
