// engram.layer_bwd with a convolution on CUDA (sm_80+): up to gV, the gradient of the gate's value
// path.
//
//   V = alpha v, beta = alpha r, r = 1 / sqrt(alpha^2 mean(v^2) + eps); gV: see conv_grad_rows.cuh
//   G A[T,n,d]; v A[T,d]; gV F32[T,n,d]
//
// Bytes: (10n+4)d a token in 16-bit types at least; here those of engram.gate_bwd with gV in fp32,
// the statistics, and 4nd more, 8nd written and 8nd read in fp32.
// Algorithm: scale and r of every row from the gate's statistics, then the steps of
// conv_grad_rows.cuh; engram.gate_bwd does the rest. Class R.
#include "ops/engram/layer_bwd/layer_bwd_args.h"
#include "ops/engram/shared/conv_grad_rows.cuh"
#include "ops/engram/shared/layer_grad_arrays.h"

namespace ehc::engram {

namespace {

struct RowScales {
  StreamStatistic alpha;
  const float* value_mean_square;
  float eps;
  int64_t streams;
  float *scales, *rstd;

  __device__ void operator()(int64_t i) const {
    const int64_t t = i / streams;
    const float gate = alpha.data[t * alpha.token_stride + i % streams];
    scales[i] = conv_beta(gate, value_mean_square[t], eps);
    rstd[i] = conv_rstd(gate, value_mean_square[t], eps);
  }
};

}  // namespace

void layer_bwd_cuda(const LayerBackwardArgs& a, const LayerGradArrays& arrays, int device,
                    void* stream) {
  constexpr const char* kName = "engram.layer_bwd";
  const GateForwardArgs& gate = a.gate.gate;
  cuda::launch_each(kName, device, stream, gate.tokens * gate.streams,
                    RowScales{gate.alpha, gate.value_mean_square, a.conv.eps, gate.streams,
                              arrays.conv.scales, arrays.rstd});
  ConvGradients gradients{};
  ConvForwardArgs& values = gradients.args;
  values.tokens = gate.tokens;
  values.streams = gate.streams;
  values.hidden = gate.hidden;
  values.activation = gate.activation;
  values.gated_value = gate.value;
  values.value_token_stride = gate.value_token_stride;
  values.image_token_mask = gate.image_token_mask;
  values.conv = a.conv;
  gradients.grad_out = a.gate.grad_out.data;
  gradients.grad_token_stride = a.gate.grad_out.token_stride;
  gradients.grad_stream_stride = a.gate.grad_out.stream_stride;
  gradients.scales = arrays.conv.scales;
  gradients.rstd = arrays.rstd;
  gradients.grad_conv = arrays.conv.grad_conv;
  gradients.row_sums = arrays.conv.row_sums;
  gradients.means = arrays.conv.means;
  gradients.grad_value = arrays.grad_value;
  gradients.partials = a.sums.partials;
  const auto size = static_cast<int64_t>(size_of(gate.activation));
  const bool vector = gate.hidden * size % 16 == 0 &&
                      is_vector(gate.value, size, gate.value_token_stride, 0) &&
                      is_vector(gradients.grad_out, size, gradients.grad_token_stride,
                                gradients.grad_stream_stride);
  conv_gradients_cuda(kName, gradients, a.sums, vector, device, stream);
}

}  // namespace ehc::engram
