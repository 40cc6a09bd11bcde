// What a custom call's attributes say, decoded once: the part of an AITER call that does not change
// from one execution to the next.
#pragma once

#include <string>

#include "aiter_api.h"
#include "spec.h"

namespace attn_dispatch {

struct Attributes {
#define FIELD(type, name) type name{};
  ATTN_AITER_SPEC(FIELD, FIELD)
#undef FIELD
};

struct CallSite {
  std::string arch;
  AttnAiterCall call{};  // its scalars; pointers, sizes and strides come with the buffers
  bool has_gaps = false;

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

// Fills `site`. Returns an empty sentence, or what is wrong with the attributes.
std::string decode(const Attributes& attributes, CallSite& site);

}  // namespace attn_dispatch
