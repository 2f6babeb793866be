// mhc.sinkhorn_fwd and mhc.sinkhorn_bwd on CUDA (sm_80+).
//
//   p = Sinkhorn(logits), formulas in sinkhorn_math.h; logits, p and gradients F32[T,n,n]
//
// Bytes a token: forward 8*n*n, backward 12*n*n.
// Algorithm: a thread per token with its matrix in registers where n is a constant; forward for
// four streams a thread per row, for it is the latency of the chain of half-steps that counts. The
// backward repeats the iteration, keeps the divisors (or potentials) of all half-steps in local
// memory, and walks back. Deterministic: a token depends on itself alone, by the operations of the
// reference in float.
#include "backends/cuda/sums.cuh"
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

// A thread per row, four streams, not on logarithms.
struct QuadForward {
  SinkhornForwardArgs a;

  __device__ void operator()(int64_t i) const {
    const int64_t t = i / kQuad;
    const int64_t row = i % kQuad;
    float logits[kQuad];
    float y[kQuad];
    load_line<kQuad>(a.logits.data + t * a.logits.token_stride + row * a.logits.row_stride, kQuad,
                     logits);
    sinkhorn_quad(a.rule, threadIdx.x % cuda::kWarp, logits, y);
    float* to = a.comb.data + t * a.comb.token_stride + row * a.comb.row_stride;
#pragma unroll
    for (int o = 0; o < kQuad; ++o) to[o] = y[o];
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
  if (a.rule.streams == kQuad && a.rule.form != SinkhornForm::log) {
    return cuda::launch_each("mhc.sinkhorn_fwd", device, stream, tokens * kQuad, QuadForward{a});
  }
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
