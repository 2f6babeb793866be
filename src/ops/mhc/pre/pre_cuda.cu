// What the entry of a sublayer has of its own on CUDA (sm_80+): the norm of its row, and backwards.
//
//   y = round((c r) w), r = 1 / sqrt(mean c^2 + eps); given g = grad_y:
//   grad_c = r (g w) - c (r^3 sum(g w c) / d)    grad_w = sum over tokens of (c r) g
//   grad_pre_i = sum over d of grad_o x_i
//   c, y, g A[T,d]; w W[d]; grad_c, grad_o A or F32[T,d]; x A[T,n,d]; grad_w F32[P,d];
//   grad_pre F32[T,n]
//
// Bytes a token in 16-bit types: the norm 4d, backwards 14d, grad_pre (2n+2)d.
// Algorithm: a block per token for sums over d, whose second pass over the row finds it in a cache.
// The norm backwards first takes the sums of all tokens, then grad_w with a thread per column and
// chunk of tokens, and only then writes grad_c, which may lie where c does.
// Class R: sums over d depend on d and the type alone, in the order of pre_big_fuse and
// pre_apply_bwd; grad_w ascends over the tokens of chunks that T decides. Tokens are independent
// else.
#include "backends/cuda/sums.cuh"
#include "core/float_formats.h"
#include "core/token_chunks.h"
#include "ops/mhc/pre/pre_args.h"
#include "ops/mhc/pre_big_fuse/pre_big_fuse_args.h"
#include "ops/mhc/shared/rms_math.h"
#include "ops/mhc/shared/stream_rows.cuh"

namespace ehc::mhc {

namespace {

constexpr int kRowPacks = 2;  // of a thread, for d up to 256 times so many

// --- the norm ---

template <class A, bool kVector>
__global__ void __launch_bounds__(kMostRowThreads)
    layer_norm(const __grid_constant__ LayerNormArgs a) {
  __shared__ cuda::SumRoom<1, kMostRowThreads> room;
  __shared__ float squares;
  const int64_t d = a.sizes.hidden;
  const int64_t step = blockDim.x * kWidth<A>;
  const A* row = row_of<const A>(a.rows, blockIdx.x);
  float sum[1] = {};
  for (int64_t at = threadIdx.x * kWidth<A>; at < d; at += step) {
    const Pack pack = cuda::load_pack<kVector>(row + at, d - at);
#pragma unroll
    for (int k = 0; k < kWidth<A>; ++k) {
      const float c = column<A>(pack, k);
      sum[0] = fmaf(c, c, sum[0]);
    }
  }
  cuda::block_sums(sum, room, [&](int, float total) { squares = total; });
  __syncthreads();
  const float factor = rms_factor<float>({d, a.eps, false}, squares);
  A* out = row_of<A>(a.out, blockIdx.x);
  for (int64_t at = threadIdx.x * kWidth<A>; at < d; at += step) {
    const int64_t count = d - at;
    const Pack pack = cuda::load_pack<kVector>(row + at, count);
    const Pack scaled = cuda::make_pack<A>([&](int k) {
      const float weight = k < count ? load_float(a.weight, a.weight_type, at + k) : 0.0f;
      return column<A>(pack, k) * factor * weight;
    });
    cuda::store_pack<kVector>(out + at, scaled, count);
  }
}

// --- the norm backwards ---

// The factor r of a token, and r^3 sum(g w c) / d.
struct NormSums {
  float* factor;  // F32[T]
  float* slope;   // F32[T]
};

template <class A, bool kVector>
__global__ void __launch_bounds__(kMostRowThreads)
    norm_sums(const __grid_constant__ LayerNormBackwardArgs a, const NormSums sums) {
  __shared__ cuda::SumRoom<2, kMostRowThreads> room;
  __shared__ float total[2];
  const int64_t d = a.sizes.hidden;
  const int64_t t = blockIdx.x;
  float sum[2] = {};
  for (int64_t at = threadIdx.x * kWidth<A>; at < d; at += blockDim.x * kWidth<A>) {
    const Pack row = cuda::load_pack<kVector>(row_of<const A>(a.rows, t) + at, d - at);
    const Pack grad = cuda::load_pack<kVector>(row_of<const A>(a.grad, t) + at, d - at);
#pragma unroll
    for (int k = 0; k < kWidth<A>; ++k) {
      if (at + k >= d) continue;
      const float x = column<A>(row, k);
      const float g = column<A>(grad, k) * load_float(a.weight, a.weight_type, at + k);
      sum[0] = fmaf(x, x, sum[0]);
      sum[1] = fmaf(g, x, sum[1]);
    }
  }
  cuda::block_sums(sum, room, [&](int k, float value) { total[k] = value; });
  __syncthreads();
  if (threadIdx.x != 0) return;
  const float factor = rms_factor<float>({d, a.eps, false}, total[0]);
  sums.factor[t] = factor;
  sums.slope[t] = total[1] * factor * factor * factor / static_cast<float>(d);
}

// Column c of a chunk's part of grad_w.
struct GradWeight {
  LayerNormBackwardArgs a;
  NormSums sums;
  float* partial;
  int64_t chunk_tokens;

  __device__ void operator()(int64_t i) const {
    const int64_t chunk = i / a.sizes.hidden;
    const int64_t c = i % a.sizes.hidden;
    const int64_t end = min(a.sizes.tokens, (chunk + 1) * chunk_tokens);
    float sum = 0;
    for (int64_t t = chunk * chunk_tokens; t < end; ++t) {
      const float x = load_float(a.rows.data, a.sizes.activation, t * a.rows.token_stride + c);
      const float g = load_float(a.grad.data, a.sizes.activation, t * a.grad.token_stride + c);
      sum = fmaf(x * __ldg(sums.factor + t), g, sum);
    }
    partial[i] = sum;
  }
};

template <class A, bool kVector>
__global__ void grad_rows(const __grid_constant__ LayerNormBackwardArgs a, const NormSums sums,
                          int64_t column_blocks) {
  const Place at = Place::of_thread<A>(a.sizes, column_blocks);
  if (at.count <= 0) return;
  const Pack row =
      cuda::load_pack<kVector>(row_of<const A>(a.rows, at.token) + at.column, at.count);
  const Pack grad =
      cuda::load_pack<kVector>(row_of<const A>(a.grad, at.token) + at.column, at.count);
  const float factor = sums.factor[at.token];
  const float slope = sums.slope[at.token];
  const auto value = [&](int k) {
    if (k >= at.count) return 0.0f;
    const float weight = load_float(a.weight, a.weight_type, at.column + k);
    return fmaf(-slope, column<A>(row, k), column<A>(grad, k) * weight * factor);
  };
  if (!a.grad_rows.is_f32) {
    cuda::store_pack<kVector>(row_of<A>(a.grad_rows.rows, at.token) + at.column,
                              cuda::make_pack<A>(value), at.count);
    return;
  }
  float* out = row_of<float>(a.grad_rows.rows, at.token) + at.column;
#pragma unroll
  for (int k = 0; k < kWidth<A>; ++k) {
    if (k < at.count) out[k] = value(k);
  }
}

// --- grad_pre ---

// G: the type of the row's gradient.
template <class A, class G, int kStreams, bool kVector>
__global__ void __launch_bounds__(kMostRowThreads) grad_pre(const __grid_constant__ GradPreArgs a) {
  constexpr int kCount = kRoom<kStreams>;
  __shared__ cuda::SumRoom<kCount, kMostRowThreads> room;
  const int64_t t = blockIdx.x;
  const int n = count_of<kStreams>(a.sizes.streams);
  float sums[kCount] = {};
  for (int64_t at = threadIdx.x * kWidth<A>; at < a.sizes.hidden; at += blockDim.x * kWidth<A>) {
    const int64_t count = a.sizes.hidden - at;
    Pack grad[kWidth<A> / kWidth<G>], x[kCount];
    const G* row = row_of<const G>(a.grad_row.rows, t) + at;
#pragma unroll
    for (int p = 0; p < kWidth<A> / kWidth<G>; ++p) {
      grad[p] = cuda::load_pack<kVector>(row + p * kWidth<G>, count - p * kWidth<G>);
    }
    load_streams<kStreams, kVector, A>(a.residual, t, at, count, n, x);
#pragma unroll
    for (int i = 0; i < n; ++i) {
#pragma unroll
      for (int k = 0; k < kWidth<A>; ++k) {
        sums[i] = fmaf(column<G>(grad[k / kWidth<G>], k % kWidth<G>), column<A>(x[i], k), sums[i]);
      }
    }
  }
  cuda::block_sums(sums, room, [&](int i, float sum) {
    if (i < n) a.grad_pre.data[t * a.grad_pre.token_stride + i] = sum;
  });
}

// --- small things ---

struct FillZeros {
  float* to;
  __device__ void operator()(int64_t i) const { to[i] = 0; }
};

struct AddCoefficients {
  Coefficients more, sum;
  int64_t streams;

  __device__ void operator()(int64_t i) const {
    const int64_t t = i / streams;
    const int64_t j = i % streams;
    sum.data[t * sum.token_stride + j] += more.data[t * more.token_stride + j];
  }
};

// Calls body(a, vector).
template <class Body>
void with_rows(const StreamSizes& sizes, bool vector, const Body& body) {
  cuda::with_activation(sizes.activation, [&](auto a) {
    vector ? body(a, std::true_type{}) : body(a, std::false_type{});
  });
}

// Rows in F32 lie on borders of 16 bytes.
bool is_f32_vector(const GradientRows& rows) {
  return reinterpret_cast<uintptr_t>(rows.rows.data) % 16 == 0 && rows.rows.token_stride % 4 == 0;
}

}  // namespace

void layer_norm_cuda(const LayerNormArgs& a, int device, void* stream) {
  with_rows(a.sizes, are_vectors(a.sizes, a.rows, a.out), [&](auto activation, auto vector) {
    launch_rows("mhc.layer_norm", device, stream, a.sizes, kRowPacks,
                &layer_norm<decltype(activation), vector()>, a);
  });
}

void layer_norm_bwd_cuda(const LayerNormBackwardArgs& a, float* partial, int device, void* stream) {
  constexpr const char* kName = "mhc.layer_norm_bwd";
  const int64_t tokens = a.sizes.tokens;
  if (tokens == 0) return;
  const int64_t sums_of_chunks = chunks_of_tokens(tokens) * a.sizes.hidden;
  const NormSums sums = {partial + sums_of_chunks, partial + sums_of_chunks + tokens};
  const bool vectors = are_vectors(a.sizes, a.rows, a.grad);
  with_rows(a.sizes, vectors, [&](auto activation, auto vector) {
    launch_rows(kName, device, stream, a.sizes, kRowPacks,
                &norm_sums<decltype(activation), vector()>, a, sums);
  });
  cuda::launch_each(kName, device, stream, sums_of_chunks,
                    GradWeight{a, sums, partial, tokens_of_chunk(tokens)});
  const bool out_is_vector = a.grad_rows.is_f32 || are_vectors(a.sizes, a.grad_rows.rows);
  with_rows(a.sizes, vectors && out_is_vector, [&](auto activation, auto vector) {
    launch_columns(kName, device, stream, a.sizes, &grad_rows<decltype(activation), vector()>, a,
                   sums);
  });
}

void grad_pre_cuda(const GradPreArgs& a, int device, void* stream) {
  const bool is_f32 = a.grad_row.is_f32;
  const bool vectors = are_vectors(a.sizes, a.residual) &&
                       (is_f32 ? is_f32_vector(a.grad_row) : are_vectors(a.sizes, a.grad_row.rows));
  with_kernel(a.sizes, vectors, [&](auto activation, auto streams, auto vector) {
    using A = decltype(activation);
    const auto start = [&](auto kernel) {
      launch_rows("mhc.grad_pre", device, stream, a.sizes, kRowPacks, kernel, a);
    };
    if (is_f32) return start(&grad_pre<A, float, streams(), vector()>);
    start(&grad_pre<A, A, streams(), vector()>);
  });
}

void fill_zeros_cuda(float* to, int64_t count, int device, void* stream) {
  cuda::launch_each("mhc.fill_zeros", device, stream, count, FillZeros{to});
}

void add_coefficients_cuda(const Coefficients& more, const Coefficients& sum, int64_t tokens,
                           int64_t streams, int device, void* stream) {
  cuda::launch_each("mhc.add_coefficients", device, stream, tokens * streams,
                    AddCoefficients{more, sum, streams});
}

}  // namespace ehc::mhc
