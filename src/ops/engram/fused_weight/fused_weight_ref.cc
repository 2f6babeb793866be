// The formula, in double and in float.
#include "core/float_formats.h"
#include "ops/engram/fused_weight/fused_weight_args.h"

namespace ehc::engram {

namespace {

template <class Real>
void multiply(const FusedWeightArgs& a, int64_t begin, int64_t end) {
  for (int64_t h = 0; h < a.streams; ++h) {
    for (int64_t i = begin; i < end; ++i) {
      const Real hidden =
          load_float(a.hidden_weight, a.hidden_type, h * a.hidden_weight_stream_stride + i);
      const Real embed =
          load_float(a.embed_weight, a.embed_type, h * a.embed_weight_stream_stride + i);
      a.fused[h * a.fused_stream_stride + i] = static_cast<float>(hidden * embed);
    }
  }
}

}  // namespace

void fused_weight_reference(const FusedWeightArgs& a, int64_t begin, int64_t end) {
  multiply<double>(a, begin, end);
}

void fused_weight_reference_f32(const FusedWeightArgs& a, int64_t begin, int64_t end) {
  multiply<float>(a, begin, end);
}

}  // namespace ehc::engram
