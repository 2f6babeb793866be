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
  launch_conv_bwd(kName, device, stream, gradients, a.sums, vector);
}

}  // namespace ehc::engram
