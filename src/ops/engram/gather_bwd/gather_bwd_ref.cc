// The formula: every row in turn looks for the places that name it.
#include "core/float_formats.h"
#include "ops/engram/gather_bwd/gather_bwd_args.h"
#include "ops/engram/shared/row_indices.h"

namespace ehc::engram {

namespace {

// sums[hd] of one row; false when no index names it.
template <class Real>
bool sum_row(const GatherBackwardArgs& a, const RowIndices& indices, int64_t tokens, int64_t row,
             Real* sums) {
  bool named = false;
  for (int64_t i = 0; i < a.width; ++i) sums[i] = 0;
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t c = 0; c < a.columns; ++c) {
      if (row_index(indices, t, c) != row) continue;
      named = true;
      for (int64_t i = 0; i < a.width; ++i) {
        sums[i] += Real(load_float(a.grad, a.type, t * a.grad_token_stride + c * a.width + i));
      }
    }
  }
  return named;
}

// The smallest row above `row` that an index names, or -1.
int64_t next_row(const RowIndices& indices, int64_t tokens, int64_t columns, int64_t row) {
  int64_t next = -1;
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t c = 0; c < columns; ++c) {
      const int64_t other = row_index(indices, t, c);
      if (other > row && (next < 0 || other < next)) next = other;
    }
  }
  return next;
}

}  // namespace

template <class Real>
void gather_bwd_reference_dense(const GatherBackwardArgs& a, const RowIndices& indices,
                                int64_t tokens, int64_t begin, int64_t end, Real* sums) {
  for (int64_t row = begin; row < end; ++row) {
    const bool named = sum_row(a, indices, tokens, row, sums);
    for (int64_t i = 0; i < a.width; ++i) {
      float& out = a.out[row * a.out_stride + i];
      if (a.target == nullptr) {
        out = static_cast<float>(sums[i]);
      } else {
        const float target = a.target[row * a.target_stride + i];
        out = named ? static_cast<float>(Real(target) + sums[i]) : target;
      }
    }
  }
}

template <class Real>
int64_t gather_bwd_reference_sparse(const GatherBackwardArgs& a, const RowIndices& indices,
                                    int64_t tokens, Real* sums) {
  int64_t unique = 0;
  for (int64_t row = -1; (row = next_row(indices, tokens, a.columns, row)) >= 0; ++unique) {
    if (a.unique_is_64) {
      static_cast<int64_t*>(a.unique_rows)[unique] = row;
    } else {
      static_cast<int32_t*>(a.unique_rows)[unique] = static_cast<int32_t>(row);
    }
    sum_row(a, indices, tokens, row, sums);
    for (int64_t i = 0; i < a.width; ++i) {
      a.out[unique * a.out_stride + i] = static_cast<float>(sums[i]);
    }
  }
  return unique;
}

#define EHC_INSTANTIATE(Real)                                                                     \
  template void gather_bwd_reference_dense(const GatherBackwardArgs&, const RowIndices&, int64_t, \
                                           int64_t, int64_t, Real*);                              \
  template int64_t gather_bwd_reference_sparse(const GatherBackwardArgs&, const RowIndices&,      \
                                               int64_t, Real*)
EHC_INSTANTIATE(double);
EHC_INSTANTIATE(float);
#undef EHC_INSTANTIATE

}  // namespace ehc::engram
