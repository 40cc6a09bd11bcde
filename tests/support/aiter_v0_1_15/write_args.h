// The fields that both of AITER's structs have, recorded by name.
#pragma once

#include "write_common.h"

namespace record {

template <typename Args>
void WriteNamed(const Args& args, const ck_tile::stream_config& config) {
  WriteCommon(args, config, args.data_type, args.is_group_mode, args.mask_type, args.bias_type);
  WriteTraining(args);
  RECORD_FIELD(use_asm_v3);
  RECORD_FIELD(v3_api_check);
  RECORD_FIELD(sink_ptr);
}

}  // namespace record
