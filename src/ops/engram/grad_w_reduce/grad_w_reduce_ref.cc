// engram.grad_w_reduce in plain loops, in double and in float.
#include <cmath>

#include "core/float_formats.h"
#include "ops/engram/grad_w_reduce/grad_w_reduce_args.h"

namespace ehc::engram {

namespace {

template <class Real>
void write(const WeightGradient& to, int64_t stream, int64_t column, Real sum) {
  const Real other =
      load_float(to.other.data, to.other.type, stream * to.other.stream_stride + column);
  const Real before = to.accumulated != nullptr
                          ? to.accumulated[stream * to.accumulated_stream_stride + column]
                          : 0.0F;
  to.grad[stream * to.grad_stream_stride + column] =
      static_cast<float>(std::fma(sum, other, before));
}

template <class Real>
void reduce(const GradWReduceArgs& a, int64_t stream, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    Real sum = 0;
    for (int64_t p = 0; p < a.partials; ++p) {
      sum += a.partial[p * a.partial_stride + stream * a.partial_stream_stride + i];
    }
    write(a.of_hidden, stream, i, sum);
    write(a.of_embed, stream, i, sum);
  }
}

}  // namespace

void grad_w_reduce_reference(const GradWReduceArgs& a, int64_t stream, int64_t begin, int64_t end) {
  reduce<double>(a, stream, begin, end);
}

void grad_w_reduce_reference_f32(const GradWReduceArgs& a, int64_t stream, int64_t begin,
                                 int64_t end) {
  reduce<float>(a, stream, begin, end);
}

}  // namespace ehc::engram
