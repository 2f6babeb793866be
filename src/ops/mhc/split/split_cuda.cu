// mhc.split_fwd, mhc.split_bwd and mhc.split_bwd_reduce on CUDA (sm_80+).
//
//   u = mixes * scale + base; pre = sigmoid(u) + eps, post = mult sigmoid(u), comb_logits = u
//   of u: grad_pre s', grad_post mult s', grad_comb_logits; grad_mixes = (of u) scale
//   grad_base = sum_t (of u), grad_scale = sum_t sum over the segment of (of u) mixes
//   mixes F32[T,N], pre and post F32[T,n], comb F32[T,n,n]; scale F32[3], base F32[N]
//
// Bytes a token: forward 8*N, backward 12*N; a reduction 4*P*width.
// Algorithm: a thread per mix of a token; backward a block per chunk of tokens with a column of
// threads per mix. A reduction has a thread per column, which adds the partials in order.
// A token's outputs depend on it alone; the sums are class R, their order depends on T and n.
#include "ops/mhc/shared/chunk_sums.cuh"
#include "ops/mhc/shared/token_steps.cuh"

namespace ehc::mhc {

namespace {

struct Forward {
  SplitForwardArgs a;

  __device__ void operator()(int64_t i) const {
    const int64_t n = a.streams;
    const int64_t mixes = n * n + 2 * n;
    const int64_t t = i / mixes;
    const int64_t j = i % mixes;
    const float mix = __ldg(a.mixes.data + t * a.mixes.token_stride + j);
    const float logit = LogitTerms(a, j < 2 * n ? j / n : 2, j).logit(mix);
    if (j < n) {
      a.pre.data[t * a.pre.token_stride + j] = split_pre(a, logit);
    } else if (j < 2 * n) {
      a.post.data[t * a.post.token_stride + j - n] = split_post(a, logit);
    } else {
      const int64_t e = j - 2 * n;
      const Coefficients& comb = a.comb_logits;
      comb.data[t * comb.token_stride + e / n * comb.row_stride + e % n] = logit;
    }
  }
};

struct Backward {
  SplitBackwardArgs a;
  SplitPartials partials;

  static constexpr int kSegments = 3;
  __device__ int begin_of(int segment) const {
    const int n = static_cast<int>(a.streams);
    return segment < 3 ? segment * n : n * n + 2 * n;
  }

  __device__ float gradient(int64_t t, int64_t j, float mix, int64_t segment) const {
    const int64_t n = a.streams;
    if (segment == 2) {
      const int64_t e = j - 2 * n;
      const Coefficients& grad = a.grad_comb_logits;
      return __ldg(grad.data + t * grad.token_stride + e / n * grad.row_stride + e % n);
    }
    const Coefficients& grad = segment == 0 ? a.grad_pre : a.grad_post;
    const float factor = segment == 0 ? 1.0f : a.post_mult;
    return mix_gate_gradient(mix_logit(mix, a.scale[segment], a.base[j]), factor,
                             __ldg(grad.data + t * grad.token_stride + j - segment * n));
  }
  __device__ MixGradient at(int64_t t, int64_t j) const {
    const int64_t segment = j < 2 * a.streams ? j / a.streams : 2;
    const float mix = __ldg(a.mixes.data + t * a.mixes.token_stride + j);
    const float grad = gradient(t, j, mix, segment);
    a.grad_mixes.data[t * a.grad_mixes.token_stride + j] = grad * a.scale[segment];
    return {grad, mix};
  }
  __device__ void put_base(int64_t chunk, int64_t j, float sum) const {
    partials.base[chunk * partials.base_stride + j] = sum;
  }
  __device__ void put_scale(int64_t chunk, int64_t segment, float sum) const {
    partials.scale[chunk * partials.scale_stride + segment] = sum;
  }
};

struct AddPartials {
  PartialSum first, second;

  __device__ void operator()(int64_t i) const {
    const PartialSum& s = i < first.width ? first : second;
    const int64_t j = i < first.width ? i : i - first.width;
    float sum = 0;
    for (int64_t p = 0; p < s.partials; ++p) sum += s.partial[p * s.partial_stride + j];
    s.sum[j] = (s.accumulated != nullptr ? s.accumulated[j] : 0.0f) + sum;
  }
};

}  // namespace

void split_fwd_cuda(const SplitForwardArgs& a, int64_t tokens, int device, void* stream) {
  const int64_t mixes = a.streams * a.streams + 2 * a.streams;
  cuda::launch_each("mhc.split_fwd", device, stream, tokens * mixes, Forward{a});
}

void split_bwd_cuda(const SplitBackwardArgs& a, const SplitPartials& partials, int64_t tokens,
                    int device, void* stream) {
  const int64_t mixes = a.streams * a.streams + 2 * a.streams;
  launch_chunks("mhc.split_bwd", device, stream, tokens, mixes, Backward{a, partials});
}

void add_partials_cuda(const char* name, const PartialSum& first, const PartialSum& second,
                       int device, void* stream) {
  cuda::launch_each(name, device, stream, first.width + second.width, AddPartials{first, second});
}

}  // namespace ehc::mhc
