// mhc.sinkhorn_fwd and mhc.sinkhorn_bwd on CUDA (sm_80+).
//
//   p = Sinkhorn(logits), formulas in sinkhorn_math.h; logits, p and gradients F32[T,n,n]
//
// Bytes a token: forward 8*n*n, backward 12*n*n.
// Algorithm: sixteen threads per token of four streams, for it is the latency of the chain of
// half-steps that counts; for other n a thread per token. The backward repeats the iteration, keeps
// the divisors (or potentials) of all half-steps in shared (or local) memory, and walks back.
// Deterministic: a token depends on itself alone, by the operations of the
// reference in float.
#include "ops/mhc/shared/token_lanes.cuh"

namespace ehc::mhc {

namespace {

// --- four streams: a thread per element ---

// The element of a thread; threads beyond the tokens repeat the last one.
struct ElementOfThread {
  int64_t token, row, column;
  bool exists;

  __device__ __forceinline__ ElementOfThread(int64_t i, int64_t tokens)
      : token(min(i / kLanesOfToken, tokens - 1)),
        row(i % kLanesOfToken / kLaneStreams),
        column(i % kLaneStreams),
        exists(i < tokens * kLanesOfToken) {}
  __device__ __forceinline__ float* of(const Coefficients& c) const {
    return c.data + token * c.token_stride + row * c.row_stride + column;
  }
};

constexpr int kLaneThreads = 64;  // of a block

int64_t lane_blocks(int64_t tokens) {
  constexpr int kTokens = kLaneThreads / kLanesOfToken;
  return (tokens + kTokens - 1) / kTokens;
}

__global__ void __launch_bounds__(kLaneThreads)
    lanes_forward(const __grid_constant__ SinkhornForwardArgs a, int64_t tokens) {
  cuda::wait_for_previous();
  const ElementOfThread at(static_cast<int64_t>(blockIdx.x) * kLaneThreads + threadIdx.x, tokens);
  const float y = sinkhorn_lanes(a.rule, __ldg(at.of(a.logits)));
  if (at.exists) *at.of(a.comb) = y;
}

// Not on logarithms.
__global__ void __launch_bounds__(kLaneThreads)
    lanes_backward(const __grid_constant__ SinkhornBackwardArgs a, int64_t tokens) {
  extern __shared__ float kept[];
  cuda::wait_for_previous();
  const ElementOfThread at(static_cast<int64_t>(blockIdx.x) * kLaneThreads + threadIdx.x, tokens);
  const int of_token = 2 * kLaneStreams * static_cast<int>(a.rule.repeat);
  const KeptDivisors room{kept + static_cast<int>(threadIdx.x) / kLanesOfToken * of_token};
  const float grad = __ldg(at.of(a.grad_comb));
  const float of_logit = sinkhorn_lanes_back(a.rule, room, __ldg(at.of(a.logits)), grad);
  if (at.exists) *at.of(a.grad_logits) = of_logit;
}

// --- others: a thread per token ---

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
  if (tokens == 0) return;
  if (a.rule.streams == kLaneStreams) {
    return cuda::launch_overlapping("mhc.sinkhorn_fwd", device, stream, &lanes_forward,
                                    dim3(cuda::blocks(lane_blocks(tokens))), dim3(kLaneThreads), 0,
                                    a, tokens);
  }
  with_streams(a.rule.streams, [&](auto streams) {
    cuda::launch_each("mhc.sinkhorn_fwd", device, stream, tokens, Forward<streams()>{a});
  });
}

void sinkhorn_bwd_cuda(const SinkhornBackwardArgs& a, int64_t tokens, int device, void* stream) {
  if (tokens == 0) return;
  if (a.rule.streams == kLaneStreams && a.rule.form != SinkhornForm::log) {
    const size_t kept = sizeof(float) * 2 * a.rule.repeat * kLaneThreads / kLaneStreams;
    return cuda::launch_overlapping("mhc.sinkhorn_bwd", device, stream, &lanes_backward,
                                    dim3(cuda::blocks(lane_blocks(tokens))), dim3(kLaneThreads),
                                    kept, a, tokens);
  }
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
