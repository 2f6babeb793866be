// The formula, sums in double and in float.
#include "core/float_formats.h"
#include "ops/engram/kv_projection/kv_projection_args.h"

namespace ehc::engram {

namespace {

template <class Real>
void project(const ProjectionArgs& a, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) {
    for (int64_t j = 0; j < a.branches; ++j) {
      for (int64_t i = 0; i < a.width; ++i) {
        const int64_t row = j * a.weight_stride + i * a.weight_row_stride;
        Real sum = 0;
        for (int64_t e = 0; e < a.depth; ++e) {
          sum += Real(load_float(a.embedding, a.type, t * a.embedding_stride + e)) *
                 Real(load_float(a.weight, a.type, row + e));
        }
        if (a.bias != nullptr) sum += Real(load_float(a.bias, a.type, j * a.bias_stride + i));
        store_float(a.kv, a.type, t * a.kv_token_stride + j * a.kv_stride + i, sum);
      }
    }
  }
}

}  // namespace

void kv_projection_reference(const ProjectionArgs& a, int64_t begin, int64_t end) {
  project<double>(a, begin, end);
}

void kv_projection_reference_f32(const ProjectionArgs& a, int64_t begin, int64_t end) {
  project<float>(a, begin, end);
}

}  // namespace ehc::engram
