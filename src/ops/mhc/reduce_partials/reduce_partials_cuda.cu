// mhc.reduce_partials_fwd and mhc.reduce_partials_bwd on CUDA (sm_80+).
//
//   m[g,j] = sum_s mul_partial[s,g,j]   q[g] = sum_s sqr_partial[s,g]   mixes[j] = sum_g m[g,j]
//   r(q[g]) grad_m[g,j] = grad[j] r(q[g])       grad_q[g] = rms_gradient of sum_j grad[j] m[g,j]
//   partials F32[S,T,G,M] and F32[S,T,G]; m F32[T,G,M], q F32[T,G], mixes and grad F32[T,M]
//
// Bytes a token: forward 4*S*G*(M+1) + 4*G*(M+1) + 4*M, backward 8*G*(M+1) + 4*M.
// Algorithm: a thread per mix of a token; backward a thread per group of a token.
// Class E but for grad_q, which a thread adds over ascending mixes. Tokens are independent.
#include "ops/mhc/shared/token_steps.cuh"

namespace ehc::mhc {

namespace {

struct Forward {
  ReducePartialsForwardArgs a;

  __device__ void operator()(int64_t i) const {
    const int64_t t = i / a.mixes;
    const int64_t j = i % a.mixes;
    const auto keep = [&](int64_t g, float sqr, const float* mul) {
      if (a.sqr.data != nullptr && j == 0) *element_of(a.sqr, t, g, 0) = sqr;
      if (a.mul.data != nullptr) *element_of(a.mul, t, g, j) = *mul;
    };
    float mixed[1];
    if (a.splits == 1) {
      reduce_some<true>(a, t, {j}, mixed, keep);
    } else {
      reduce_some<false>(a, t, {j}, mixed, keep);
    }
    *element_of(a.mixed, t, 0, j) = mixed[0];
  }
};

struct Backward {
  ReducePartialsBackwardArgs a;

  __device__ void operator()(int64_t i) const {
    const int64_t t = i / a.groups;
    const int64_t g = i % a.groups;
    const float sqr = *element_of(a.sqr, t, g, 0);
    const float factor = rms_factor(a.rms, sqr);
    float grad_factor = 0;
    for (int64_t j = 0; j < a.mixes; ++j) {
      const float grad = *element_of(a.grad_mixed, t, 0, j);
      grad_factor = fmaf(grad, *element_of(a.mul, t, g, j), grad_factor);
      *element_of(a.grad_mul, t, g, j) = grad * factor;
    }
    *element_of(a.grad_sqr, t, g, 0) = rms_gradient(a.rms, sqr, factor, grad_factor);
  }
};

}  // namespace

void reduce_partials_fwd_cuda(const ReducePartialsForwardArgs& a, int64_t tokens, int device,
                              void* stream) {
  cuda::launch_each("mhc.reduce_partials_fwd", device, stream, tokens * a.mixes, Forward{a});
}

void reduce_partials_bwd_cuda(const ReducePartialsBackwardArgs& a, int64_t tokens, int device,
                              void* stream) {
  cuda::launch_each("mhc.reduce_partials_bwd", device, stream, tokens * a.groups, Backward{a});
}

}  // namespace ehc::mhc
