// Kernels in which a compiler must put s_nop between instructions; without branches.
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
#define KERNEL __kernel __attribute__((reqd_work_group_size(64, 1, 1))) void

typedef float float16x __attribute__((ext_vector_type(16)));
typedef half half4x __attribute__((ext_vector_type(4)));
typedef uint uint2x __attribute__((ext_vector_type(2)));

#define THREAD __builtin_amdgcn_workitem_id_x()
#define MULTIPLY_16 __builtin_amdgcn_mfma_f32_16x16x16f16
#define MULTIPLY_32 __builtin_amdgcn_mfma_f32_32x32x8f16

KERNEL stored(__global float4* restrict out, __global half4x* restrict a) {
  const uint t = THREAD;
  const float4 zero = 0;
  out[t] = MULTIPLY_16(a[t], a[t + 64], zero, 0, 0, 0);
}

KERNEL stored_of_32(__global float16x* restrict out, __global half4x* restrict a) {
  const uint t = THREAD;
  const float16x zero = 0;
  out[t] = MULTIPLY_32(a[t], a[t + 64], zero, 0, 0, 0);
}

KERNEL factor(__global float4* restrict out, __global half4x* restrict a) {
  const uint t = THREAD;
  const float4 zero = 0, sum = MULTIPLY_16(a[t], a[t + 64], zero, 0, 0, 0);
  out[t] = MULTIPLY_16(__builtin_astype(sum.xy, half4x), a[t + 64], sum, 0, 0, 0);
}

KERNEL factor_of_32(__global float16x* restrict out, __global half4x* restrict a) {
  const uint t = THREAD;
  const float16x zero = 0, sum = MULTIPLY_32(a[t], a[t + 64], zero, 0, 0, 0);
  out[t] = MULTIPLY_32(__builtin_astype(sum.s01, half4x), a[t + 64], sum, 0, 0, 0);
}

KERNEL part_of_a_sum(__global float4* restrict out, __global half4x* restrict a) {
  const uint t = THREAD;
  const float16x zero = 0, sum = MULTIPLY_32(a[t], a[t + 64], zero, 0, 0, 0);
  out[t] = MULTIPLY_16(a[t + 64], a[t], sum.s4567, 0, 0, 0);
}

KERNEL added(__global float4* restrict out, __global half4x* restrict a) {
  const uint t = THREAD;
  const float4 zero = 0, sum = MULTIPLY_16(a[t], a[t + 64], zero, 0, 0, 0);
  out[t] = 2 * MULTIPLY_16(a[t + 64], a[t], sum, 0, 0, 0);
}

KERNEL softmax(__global float4* restrict out, __global half4x* restrict a, float scale) {
  const uint t = THREAD;
  const float4 zero = 0, score = MULTIPLY_16(a[t], a[t + 64], zero, 0, 0, 0);
  float most = fmax(fmax(score.x, score.y), fmax(score.z, score.w));
  most = fmax(most, as_float(__builtin_amdgcn_mov_dpp(as_int(most), 0xb1, 15, 15, false)));
  most = fmax(most, as_float(__builtin_amdgcn_mov_dpp(as_int(most), 0x4e, 15, 15, false)));
  float4 weight;
  for (int i = 0; i < 4; ++i) weight[i] = __builtin_amdgcn_exp2f((score[i] - most) * scale);
  weight *= __builtin_amdgcn_rcpf(weight.x + weight.y + weight.z + weight.w);
  half4x rounded;
  for (int i = 0; i < 4; ++i) rounded[i] = t + i > 20 ? most : weight[i];
  out[t] = MULTIPLY_16(rounded, a[t + 64], score, 0, 0, 0);
}

KERNEL one_lane(__global float* restrict out, __global float* restrict a) {
  const uint t = THREAD;
  const float x = __builtin_amdgcn_exp2f(a[t]);
  const float first = as_float(__builtin_amdgcn_readfirstlane(as_int(x)));
  out[t] = a[t] > 3 * first ? x : 1;
}

KERNEL place(__global float* restrict out, __global int* restrict a) {
  const uint t = THREAD;
  const int row = __builtin_amdgcn_readfirstlane(a[t]);
  out[t] = out[t + row] / out[t + 64];
}

KERNEL stored_then_overwritten(__global float4* restrict out, __global half4x* restrict a) {
  const uint t = THREAD;
  __amdgpu_buffer_rsrc_t all = __builtin_amdgcn_make_buffer_rsrc(out, 0, 4096, 0x27000);
  const half4x x = a[t], y = a[t + 64];
  float4 sum = ((__global float4*)a)[t + 512];
  __builtin_amdgcn_raw_buffer_store_b128(as_uint4(sum), all, 16 * t, 0, 0);
  sum = MULTIPLY_16(x, y, sum, 0, 0, 0);
  __builtin_amdgcn_raw_buffer_store_b128(as_uint4(sum), all, 16 * t, 2048, 0);
}

#ifdef GFX950
KERNEL swapped_rows(__global uint* restrict out, __global uint* restrict a) {
  const uint t = THREAD;
  const uint2x x = __builtin_amdgcn_permlane16_swap(a[t] + 1, 3 * a[t + 64], false, false);
  const uint2x y = __builtin_amdgcn_permlane32_swap(x.x, x.y, false, false);
  out[t] = y.x + y.y;
}
#endif
