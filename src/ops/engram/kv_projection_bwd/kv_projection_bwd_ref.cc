// The formulas, sums in double and in float.
#include "core/float_formats.h"
#include "ops/engram/kv_projection_bwd/kv_projection_bwd_args.h"

namespace ehc::engram {

namespace {

template <class Real>
Real grad_kv(const ProjectionBackwardArgs& a, int64_t t, int64_t j, int64_t i) {
  return Real(load_float(a.grad_kv, a.type, t * a.grad_kv_token_stride + j * a.grad_kv_stride + i));
}

template <class Real>
void token_gradients(const ProjectionBackwardArgs& a, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) {
    for (int64_t e = 0; e < a.depth; ++e) {
      Real sum = 0;
      for (int64_t j = 0; j < a.branches; ++j) {
        for (int64_t i = 0; i < a.width; ++i) {
          const int64_t at = j * a.weight_stride + i * a.weight_row_stride + e;
          sum += grad_kv<Real>(a, t, j, i) * Real(load_float(a.weight, a.type, at));
        }
      }
      store_float(a.grad_embedding, a.type, t * a.grad_embedding_stride + e, sum);
    }
  }
}

// Of rows (j, i) = [begin, end).
template <class Real>
void parameter_gradients(const ProjectionBackwardArgs& a, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const int64_t j = row / a.width;
    const int64_t i = row % a.width;
    for (int64_t e = 0; e < a.depth; ++e) {
      Real sum = 0;
      for (int64_t t = 0; t < a.tokens; ++t) {
        sum += grad_kv<Real>(a, t, j, i) *
               Real(load_float(a.embedding, a.type, t * a.embedding_stride + e));
      }
      if (a.grad_weight_acc != nullptr) {
        sum += Real(
            a.grad_weight_acc[j * a.grad_weight_acc_stride + i * a.grad_weight_acc_row_stride + e]);
      }
      a.grad_weight[j * a.grad_weight_stride + i * a.grad_weight_row_stride + e] =
          static_cast<float>(sum);
    }
    Real sum = 0;
    for (int64_t t = 0; t < a.tokens; ++t) sum += grad_kv<Real>(a, t, j, i);
    if (a.grad_bias_acc != nullptr) sum += Real(a.grad_bias_acc[j * a.grad_bias_acc_stride + i]);
    a.grad_bias[j * a.grad_bias_stride + i] = static_cast<float>(sum);
  }
}

}  // namespace

void kv_projection_bwd_tokens(const ProjectionBackwardArgs& a, int64_t begin, int64_t end) {
  token_gradients<double>(a, begin, end);
}
void kv_projection_bwd_tokens_f32(const ProjectionBackwardArgs& a, int64_t begin, int64_t end) {
  token_gradients<float>(a, begin, end);
}
void kv_projection_bwd_parameters(const ProjectionBackwardArgs& a, int64_t begin, int64_t end) {
  parameter_gradients<double>(a, begin, end);
}
void kv_projection_bwd_parameters_f32(const ProjectionBackwardArgs& a, int64_t begin, int64_t end) {
  parameter_gradients<float>(a, begin, end);
}

}  // namespace ehc::engram
