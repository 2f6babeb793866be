// Steps of the reference of engram.layer_bwd with a convolution, in this order; each needs all of
// the one before.
#pragma once

#include "ops/engram/layer_bwd/layer_bwd_args.h"
#include "ops/engram/shared/gate_reference.h"

namespace ehc::engram {

template <class Real>
struct LayerGate {
  StreamGate<Real> gate;
  Real beta, rstd_value;
  Real mean;  // of g gu n
};

template <class Real>
struct LayerBackwardArrays {
  LayerGate<Real>* gates;        // [T, n]
  Real* slopes;                  // [T, n]
  Real *grad_conv, *grad_input;  // gc and gu, [T, n, d]
};

// The gates of tokens [begin, end)
template <class Real>
void layer_bwd_reference_gates(const LayerBackwardArgs& args, LayerGate<Real>* gates, int64_t begin,
                               int64_t end);
// gc of tokens
template <class Real>
void layer_bwd_reference_conv(const LayerBackwardArgs& args,
                              const LayerBackwardArrays<Real>& arrays, int64_t begin, int64_t end);
// gu of tokens
template <class Real>
void layer_bwd_reference_inputs(const LayerBackwardArgs& args,
                                const LayerBackwardArrays<Real>& arrays, int64_t begin,
                                int64_t end);
// gradients of the convolution's weights, of streams
template <class Real>
void layer_bwd_reference_sums(const LayerBackwardArgs& args,
                              const LayerBackwardArrays<Real>& arrays, int64_t begin, int64_t end);
// gradients of tokens, and their slopes; gc is lost
template <class Real>
void layer_bwd_reference_tokens(const LayerBackwardArgs& args,
                                const LayerBackwardArrays<Real>& arrays, int64_t begin,
                                int64_t end);

}  // namespace ehc::engram
