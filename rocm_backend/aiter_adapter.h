// What the files of the adapter share. They are several because AITER's forward and backward
// headers define the same names and cannot meet in one file.
#pragma once

#include <hip/hip_runtime_api.h>

#include <exception>
#include <functional>
#include <string>

#include "aiter_api.h"

namespace attn_dispatch::aiter_adapter {

int Forward(const AttnAiterForward* call, void* stream, char* message, int32_t size);
int Backward(const AttnAiterBackward* call, void* stream, char* message, int32_t size);
int SplitKv(const AttnAiterSplitKv* call, void* stream, char* message, int32_t size);
int ForwardTakesAsm(const AttnAiterForward* call, char* message, int32_t size);
int BackwardTakesAsm(const AttnAiterBackward* call, char* message, int32_t size);

// Writes the sentence and returns 1.
int Fail(char* message, int32_t size, const std::string& sentence);

// The facts AITER chooses a kernel by.
std::string Describe(const AttnAiterCall& call);

// AITER says "bf16" and "fp16".
std::string DtypeName(const AttnAiterCall& call);

// Why an ASM kernel cannot be launched from here, or "". AITER would end the process instead: a HIP
// call that fails makes it exit(0), and it loads kernels from files on their first use.
std::string AsmTrouble(const char* subfolder);

// Does `work`, which launches ASM kernels on the current device and never throws. AITER loads each
// kernel once in a host thread, on the device that is current then: a thread that goes on to
// another device lets a thread of that device do it, and waits.
int OnThreadOfDevice(const std::function<int()>& work, char* message, int32_t size);

// Between these HIP's last error is AITER's. Since HIP 7 that is the last failure of any call in
// the thread, whoever made it, and CK stops after its first kernel where there is one; and what
// AITER leaves would be taken for an error of the calls that come next.
struct OwnErrors {
  OwnErrors() { (void)hipGetLastError(); }
  ~OwnErrors() { (void)hipGetLastError(); }
};

// `run` with what it throws, and HIP's error if it leaves one, made into a sentence. It returns
// AITER's time: below zero where AITER has no kernel.
template <typename Run>
int Launch(const AttnAiterCall& call, char* message, int32_t size, Run&& run) {
  const OwnErrors own_errors;
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

// Where `ask` is AITER's answer to whether it would launch an ASM kernel.
template <typename Ask>
int TakesAsm(const AttnAiterCall& call, char* message, int32_t size, Ask&& ask) {
  const OwnErrors own_errors;
  try {
    return ask() > 0 ? 1 : 0;
  } catch (const std::exception& error) {
    Fail(message, size, std::string("AITER failed (") + error.what() + ") on: " + Describe(call));
  } catch (...) {
    Fail(message, size, "AITER failed on: " + Describe(call));
  }
  return -1;
}

// What all of AITER's arguments call by the same names.
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

// What the forward and the backward pass over whole rows have besides.
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

}  // namespace attn_dispatch::aiter_adapter
