// CK's kernels before and after AITER's ASM backward pass. AITER's headers only declare them; here
// they are defined for every trait, and record that they were launched.
#pragma once

#include "mha_bwd.h"
#include "record.h"

template <typename Traits, typename Arch>
void fmha_bwd_dot_do_o_oneshot_(const ck_tile::stream_config&, fmha_bwd_args) {
  record::Record("dot_do_o");
}

template <typename Traits, typename Arch>
std::string fmha_bwd_dot_do_o_get_name_() {
  return "dot_do_o";
}

template <typename Traits, typename Arch>
void fmha_bwd_convert_dq_oneshot_(const ck_tile::stream_config&, fmha_bwd_args) {
  record::Record("convert_dq");
}

template <typename Traits, typename Arch>
std::string fmha_bwd_convert_dq_get_name_() {
  return "convert_dq";
}
