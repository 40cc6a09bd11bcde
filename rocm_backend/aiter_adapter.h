// What the files of the adapter share. aiter_adapter.cc serves every generation of AITER's C++
// interface. Files named after a generation, such as aiter_dev18_forward.cc, include its headers:
// several of them, because the forward and the backward header define the same names.
#pragma once

#include <hip/hip_runtime_api.h>

#include <exception>
#include <optional>
#include <string>

#include "aiter_api.h"

namespace attn_dispatch::aiter_adapter {

// The generation that this library was built for, for example "dev18".
const char* Generation();

int Forward(const AttnAiterForward* call, void* stream, char* message, int32_t size);
int Backward(const AttnAiterBackward* call, void* stream, char* message, int32_t size);
int SplitKv(const AttnAiterSplitKv* call, void* stream, char* message, int32_t size);
int ForwardTakesAsm(const AttnAiterForward* call, char* message, int32_t size);
int BackwardTakesAsm(const AttnAiterBackward* call, char* message, int32_t size);

// Writes the sentence to `message`, cut to `size` bytes, and returns 1.
int Fail(char* message, int32_t size, const std::string& sentence);

// The facts by which AITER chooses a kernel, for messages.
std::string Describe(const AttnAiterCall& call);

// AITER's name of the call's dtype, "bf16" or "fp16".
std::string DtypeName(const AttnAiterCall& call);

// Why no ASM kernel can be loaded from this subfolder, if that is so. AITER would end the process
// instead: it loads kernels from files on first use, and calls exit(0) where HIP fails.
std::optional<std::string> AsmFolderError(const char* subfolder);

// A scope in which HIP's last error is AITER's: it clears the error at both ends. Since HIP 7 the
// last error is that of any earlier call in the thread, and CK stops after its first kernel if
// there is one. An error that AITER leaves behind would be blamed on a later call.
struct HipErrorScope {
  HipErrorScope() { (void)hipGetLastError(); }
  ~HipErrorScope() { (void)hipGetLastError(); }
};

// Calls `run`, and makes a sentence of what it throws and of HIP's last error after it. `run`
// returns AITER's time, which is below zero where AITER has no kernel.
template <typename Run>
int Launch(const AttnAiterCall& call, char* message, int32_t size, Run&& run) {
  const HipErrorScope hip_errors;
  try {
    if (run() < 0) {
      return Fail(
          message, size,
          "AITER has no kernel for this call (a build with --filter has only some of them): " +
              Describe(call));
    }
    const hipError_t error = hipGetLastError();
    if (error != hipSuccess) {
      return Fail(message, size,
                  std::string("HIP reports \"") + hipGetErrorString(error) +
                      "\" after AITER's launch of: " + Describe(call));
    }
    return 0;
  } catch (const std::exception& error) {
    return Fail(message, size,
                std::string("AITER failed (") + error.what() + ") on: " + Describe(call));
  } catch (...) {
    return Fail(message, size, "AITER failed on: " + Describe(call));
  }
}

// Calls `ask`, which returns AITER's answer to whether it would launch an ASM kernel: above zero if
// so.
template <typename Ask>
int TakesAsm(const AttnAiterCall& call, char* message, int32_t size, Ask&& ask) {
  const HipErrorScope hip_errors;
  try {
    return ask() > 0 ? 1 : 0;
  } catch (const std::exception& error) {
    Fail(message, size, std::string("AITER failed (") + error.what() + ") on: " + Describe(call));
  } catch (...) {
    Fail(message, size, "AITER failed on: " + Describe(call));
  }
  return -1;
}

// Sets the arguments that all of AITER's structs have under the same names.
template <typename Args>
void FillShared(const AttnAiterCall& call, Args& args) {
  args.q_ptr = call.q;
  args.k_ptr = call.k;
  args.v_ptr = call.v;
  args.bias_ptr = call.bias;
  args.seqstart_q_ptr = call.seqstart_q;
  args.seqstart_k_ptr = call.seqstart_k;
  args.seqlen_k_ptr = call.seqlen_k;

  args.seqlen_q = call.seq_len_q;
  args.seqlen_k = call.seq_len_kv;
  args.batch = call.batch;
  args.max_seqlen_q = call.max_seq_len_q;
  args.hdim_q = call.head_dim;
  args.hdim_v = call.head_dim_v;
  args.nhead_q = call.num_heads;
  args.nhead_k = call.num_kv_heads;

  args.stride_q = call.stride_q;
  args.stride_k = call.stride_k;
  args.stride_v = call.stride_v;
  args.stride_bias = call.stride_bias;
  args.stride_o = call.stride_out;
  args.nhead_stride_q = call.nhead_stride_q;
  args.nhead_stride_k = call.nhead_stride_k;
  args.nhead_stride_v = call.nhead_stride_v;
  args.nhead_stride_bias = call.nhead_stride_bias;
  args.nhead_stride_o = call.nhead_stride_out;
  args.batch_stride_q = call.batch_stride_q;
  args.batch_stride_k = call.batch_stride_k;
  args.batch_stride_v = call.batch_stride_v;
  args.batch_stride_bias = call.batch_stride_bias;
  args.batch_stride_o = call.batch_stride_out;

  args.window_size_left = call.window_left;
  args.window_size_right = call.window_right;
  args.mask_type = call.mask;
}

// Sets the arguments that forward and backward share, those of split-KV included.
template <typename Args>
void FillCommon(const AttnAiterCall& call, Args& args) {
  FillShared(call, args);
  args.seqlen_q_ptr = call.seqlen_q;
  args.p_drop = call.dropout_rate;
  // Read on the device, so that one compiled call serves every step's seed.
  if (call.rng_state != nullptr) {
    args.drop_seed_offset = std::make_pair(static_cast<const void*>(call.rng_state),
                                           static_cast<const void*>(call.rng_state + 1));
  } else {
    args.drop_seed_offset = std::make_pair(uint64_t{0}, uint64_t{0});
  }
}

// Sets the arguments of the backward pass that all generations have.
template <typename Args>
void FillBackward(const AttnAiterBackward& backward, Args& args) {
  args.o_ptr = backward.out;
  args.lse_ptr = backward.lse;
  args.do_ptr = backward.out_grad;
  args.d_ptr = backward.softmax_d;
  args.dq_ptr = backward.dq;
  args.dk_ptr = backward.dk;
  args.dv_ptr = backward.dv;
  args.dbias_ptr = backward.dbias;
  args.max_seqlen_k = backward.call.max_seq_len_kv;
  args.scale = backward.call.scale;
  args.p_undrop = 1 - backward.call.dropout_rate;
  args.nhead_stride_lsed = backward.call.nhead_stride_lse;
  args.batch_stride_lsed = backward.call.batch_stride_lse;
  args.stride_do = backward.stride_out_grad;
  args.stride_dq = backward.stride_dq;
  args.stride_dk = backward.stride_dk;
  args.stride_dv = backward.stride_dv;
  args.stride_dbias = backward.stride_dbias;
  args.nhead_stride_do = backward.nhead_stride_out_grad;
  args.nhead_stride_dq = backward.nhead_stride_dq;
  args.nhead_stride_dk = backward.nhead_stride_dk;
  args.nhead_stride_dv = backward.nhead_stride_dv;
  args.nhead_stride_dbias = backward.nhead_stride_dbias;
  args.batch_stride_do = backward.batch_stride_out_grad;
  args.batch_stride_dq = backward.batch_stride_dq;
  args.batch_stride_dk = backward.batch_stride_dk;
  args.batch_stride_dv = backward.batch_stride_dv;
  args.batch_stride_dbias = backward.batch_stride_dbias;
}

}  // namespace attn_dispatch::aiter_adapter
