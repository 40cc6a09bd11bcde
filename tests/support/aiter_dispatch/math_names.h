// Clang's HIP headers use these names of the standard library, which has them since GCC 14.
#pragma once

#include <cmath>

#if defined(__GLIBCXX__) && (!defined(_GLIBCXX_RELEASE) || _GLIBCXX_RELEASE < 14)
namespace std {
using ::acosf, ::acoshf, ::asinf, ::asinhf, ::atanf, ::atanhf, ::ceilf, ::cosf, ::coshf, ::erff;
using ::exp2f, ::expf, ::expm1f, ::fabsf, ::floorf, ::fmaf, ::fmaxf, ::fminf, ::fmodf, ::log1pf;
using ::log2f, ::logf, ::powf, ::rintf, ::roundf, ::sinf, ::sinhf, ::sqrtf, ::tanf, ::tanhf;
}  // namespace std
#endif
