// engram.conv_bwd on CUDA (sm_80+).
//
//   grad_V = G + r (g gu - V r^2 mean(g gu V)), grad_W, grad_g: see conv_grad_rows.cuh
//   G, V, grad_V A[T,n,d]; W, grad_W [n,d,w]; g, grad_g [n,d]
//
// Bytes: 6nd a token in 16-bit types at least; here 14nd, and 4nd written and 8nd read of gc in
// fp32. Algorithm: the norms, then the steps of conv_grad_rows.cuh. Class R.
#include "ops/engram/shared/conv_grad_rows.cuh"

namespace ehc::engram {

void conv_norms_cuda(const char* name, const ConvForwardArgs& args, float* norms, int device,
                     void* stream);

void conv_gradients_cuda(const char* name, const ConvGradients& a, const ConvSumArgs& sums,
                         bool vector, int device, void* stream) {
  const ConvForwardArgs& f = a.args;
  if (f.tokens > 0) {
    launch_conv(name, device, stream, a, vector);
    cuda::with_activation(f.activation, [&](auto activation) {
      using A = decltype(activation);
      constexpr int64_t kThreads = 128;
      const int64_t packs = cuda::packs_of(f.hidden, kWidth<A>);
      const int64_t column_blocks = (packs + kThreads - 1) / kThreads;
      const auto launch = [&](auto kernel, int64_t tokens) {
        cuda::launch(
            name, device, stream, kernel,
            dim3(cuda::blocks((f.tokens + tokens - 1) / tokens * f.streams * column_blocks)),
            dim3(kThreads), 0, a, vector, column_blocks, tokens);
      };
      const bool four = f.conv.taps == kChainTaps;
      launch(four ? &conv_chunk_sums<A, true> : &conv_chunk_sums<A, false>,
             conv_bwd_chunk(f.tokens));
      cuda::launch_each(name, device, stream, f.tokens * f.streams, RowMean<A>{a});
      launch(four ? &conv_grad_values<A, true> : &conv_grad_values<A, false>,
             std::clamp<int64_t>(f.tokens / 64, 1, 16));
    });
  }
  cuda::launch_each(name, device, stream, f.streams * f.hidden,
                    ConvWeightSums{a.partials, f.conv, f.hidden, sums.of_taps, sums.of_norm});
}

void conv_bwd_cuda(const ConvBackwardArgs& a, const ConvGradArrays& arrays, int device,
                   void* stream) {
  constexpr const char* kName = "engram.conv_bwd";
  const ConvForwardArgs& f = a.forward;
  conv_norms_cuda(kName, f, arrays.scales, device, stream);
  const ConvGradients gradients = {
      .args = f,
      .grad_out = a.grad_out,
      .grad_token_stride = a.grad_token_stride,
      .grad_stream_stride = a.grad_stream_stride,
      .scales = arrays.scales,
      .rstd = arrays.scales,
      .grad_conv = arrays.grad_conv,
      .row_sums = arrays.row_sums,
      .means = arrays.means,
      .grad_value = nullptr,
      .grad_rows = a.grad_value,
      .grad_rows_token_stride = a.grad_value_token_stride,
      .grad_rows_stream_stride = a.grad_value_stream_stride,
      .partials = a.sums.partials,
  };
  const auto size = static_cast<int64_t>(size_of(f.activation));
  const bool vector =
      f.hidden * size % 16 == 0 &&
      is_vector(f.gated_value, size, f.value_token_stride, f.value_stream_stride) &&
      is_vector(a.grad_out, size, a.grad_token_stride, a.grad_stream_stride) &&
      is_vector(a.grad_value, size, a.grad_value_token_stride, a.grad_value_stream_stride);
  conv_gradients_cuda(kName, gradients, a.sums, vector, device, stream);
}

}  // namespace ehc::engram
