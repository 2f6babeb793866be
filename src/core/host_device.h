// Marks the small functions that host code, SIMD code and CUDA kernels share. They are always
// inlined: a copy emitted by a file compiled for one instruction set could be linked into others.
#pragma once

#if defined(__CUDACC__)
#define EHC_HD __host__ __device__ __forceinline__
#else
#define EHC_HD [[gnu::always_inline]] inline
#endif

#if defined(__CUDA_ARCH__)
// device intrinsics need no header
#elif defined(__SSE2__)
#include <emmintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#else
#include <cmath>
#endif

namespace ehc {

// Correctly rounded square roots. std::sqrt would do, but may call libm for a negative argument,
// and code compiled per instruction set imports nothing from there.
EHC_HD float square_root(float x) {
#if defined(__CUDA_ARCH__)
  return __fsqrt_rn(x);
#elif defined(__SSE2__)
  return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(x)));
#elif defined(__ARM_NEON)
  return vget_lane_f32(vsqrt_f32(vdup_n_f32(x)), 0);
#else
  return std::sqrt(x);
#endif
}

EHC_HD double square_root(double x) {
#if defined(__CUDA_ARCH__)
  return __dsqrt_rn(x);
#elif defined(__SSE2__)
  return _mm_cvtsd_f64(_mm_sqrt_sd(_mm_setzero_pd(), _mm_set_sd(x)));
#elif defined(__ARM_NEON)
  return vget_lane_f64(vsqrt_f64(vdup_n_f64(x)), 0);
#else
  return std::sqrt(x);
#endif
}

// |x| by its sign bit: NaN stays NaN.
EHC_HD float magnitude(float x) { return __builtin_fabsf(x); }
EHC_HD double magnitude(double x) { return __builtin_fabs(x); }

EHC_HD float copy_sign(float size, float sign) { return __builtin_copysignf(size, sign); }
EHC_HD double copy_sign(double size, double sign) { return __builtin_copysign(size, sign); }

}  // namespace ehc
