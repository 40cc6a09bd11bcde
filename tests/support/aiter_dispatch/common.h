// The headers that AITER's sources and the adapter include, precompiled once: see build.py.
#include <hip/hip_runtime.h>

#include "bias.hpp"
#include "ck_tile/core.hpp"
#include "ck_tile/host/kernel_launch.hpp"
#include "ck_tile/ops/epilogue.hpp"
#include "ck_tile/ops/fmha.hpp"
#include "mask.hpp"
