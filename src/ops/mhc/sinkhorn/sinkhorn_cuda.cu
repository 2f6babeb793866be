// mhc.sinkhorn_fwd and mhc.sinkhorn_bwd on CUDA (sm_80+).
//
//   p = Sinkhorn(logits), formulas in sinkhorn_math.h; logits, p and gradients F32[T,n,n]
//
// Bytes a token: forward 8*n*n, backward 12*n*n.
// Algorithm: a thread per token with its matrix in registers where n is a constant. The backward
// repeats the iteration, keeps the divisors (or potentials) of all half-steps in local memory, and
// walks back.
// Deterministic: a token depends on itself alone, by the operations of the reference in float.
#include "ops/mhc/shared/token_steps.cuh"

namespace ehc::mhc {

namespace {

template <int kStreams>
struct Forward {
  SinkhornForwardArgs a;

  __device__ void operator()(int64_t t) const {
    float logits[kMatrixRoom<kStreams>];
    float y[kMatrixRoom<kStreams>];
    load_matrix<kStreams>(a.logits, t, a.rule.streams, logits);
    sinkhorn_matrix<kStreams>(a.rule, SharedRounds<kStreams>{a.rule}, logits, y);
    store_matrix<kStreams>(y, t, a.rule.streams, a.comb);
  }
};

// kRepeat: the most rounds that there is room for.
template <int kStreams, int kRepeat>
struct Backward {
  SinkhornBackwardArgs a;

  __device__ void operator()(int64_t t) const {
    float logits[kMatrixRoom<kStreams>];
    float grad[kMatrixRoom<kStreams>];
    float trace[kSinkhornTrace<kStreams, kRepeat>];
    load_matrix<kStreams>(a.logits, t, a.rule.streams, logits);
    load_matrix<kStreams>(a.grad_comb, t, a.rule.streams, grad);
    sinkhorn_matrix_back<kStreams>(a.rule, SharedRounds<kStreams>{a.rule}, logits, trace, grad);
    store_matrix<kStreams>(grad, t, a.rule.streams, a.grad_logits);
  }
};

constexpr int kUsualRepeat = 20;

}  // namespace

void sinkhorn_fwd_cuda(const SinkhornForwardArgs& a, int64_t tokens, int device, void* stream) {
  with_streams(a.rule.streams, [&](auto streams) {
    cuda::launch_each("mhc.sinkhorn_fwd", device, stream, tokens, Forward<streams()>{a});
  });
}

void sinkhorn_bwd_cuda(const SinkhornBackwardArgs& a, int64_t tokens, int device, void* stream) {
  with_streams(a.rule.streams, [&](auto streams) {
    if (a.rule.repeat <= kUsualRepeat) {
      cuda::launch_each("mhc.sinkhorn_bwd", device, stream, tokens,
                        Backward<streams(), kUsualRepeat>{a});
    } else {
      cuda::launch_each("mhc.sinkhorn_bwd", device, stream, tokens,
                        Backward<streams(), kMaxRepeat>{a});
    }
  });
}

}  // namespace ehc::mhc
