// mhc.post_fwd and mhc.post_bwd in plain loops, in double and in float.
#include "ops/mhc/post/post_args.h"
#include "ops/mhc/post/post_math.h"
#include "ops/mhc/shared/stream_reference.h"

namespace ehc::mhc {

template <class Real>
void post_fwd_reference(const PostForwardArgs& a, const Tile& tile) {
  const int64_t streams = a.sizes.streams;
  for (int64_t t = tile.token_begin; t < tile.token_end; ++t) {
    for (int64_t c = tile.column_begin; c < tile.column_end; ++c) {
      Real b[kMaxStreams];  // the output may be the residual
      for (int64_t i = 0; i < streams; ++i) b[i] = load(a.sizes, a.residual, t, i, c);
      const Real y = load(a.sizes, a.layer_output, t, 0, c);
      for (int64_t o = 0; o < streams; ++o) {
        const Real x = post_column<Real>(
            load(a.post, t, 0, o), [&](int64_t i) { return load(a.comb, t, i, o); }, streams, y,
            [&](int64_t i) { return b[i]; });
        store(a.sizes, a.new_residual, t, o, c, x);
      }
    }
  }
}

namespace {

// A row r with coefficients in the new streams: its gradient, and theirs.
template <class Real>
void mixed_row(const PostBackwardArgs& a, int64_t t, const StreamRows& rows, int64_t r,
               const Coefficients& coefficients, const StreamRows& grad_rows,
               const Coefficients& grad_coefficients) {
  Real sums[kMaxStreams] = {};
  for (int64_t c = 0; c < a.sizes.hidden; ++c) {
    const Real x = load(a.sizes, rows, t, r, c);
    Real sum = 0;
    for (int64_t o = 0; o < a.sizes.streams; ++o) {
      const Real g = load(a.sizes, a.grad_new_residual, t, o, c);
      sums[o] = std::fma(x, g, sums[o]);
      sum = std::fma(static_cast<Real>(load(coefficients, t, r, o)), g, sum);
    }
    store(a.sizes, grad_rows, t, r, c, sum);
  }
  for (int64_t o = 0; o < a.sizes.streams; ++o) {
    store(grad_coefficients, t, r, o, sums[o]);
  }
}

}  // namespace

template <class Real>
void post_bwd_reference(const PostBackwardArgs& a, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) {
    mixed_row<Real>(a, t, a.layer_output, 0, a.post, a.grad_layer_output, a.grad_post);
    for (int64_t i = 0; i < a.sizes.streams; ++i) {
      mixed_row<Real>(a, t, a.residual, i, a.comb, a.grad_residual, a.grad_comb);
    }
  }
}

template void post_fwd_reference<double>(const PostForwardArgs&, const Tile&);
template void post_fwd_reference<float>(const PostForwardArgs&, const Tile&);
template void post_bwd_reference<double>(const PostBackwardArgs&, int64_t, int64_t);
template void post_bwd_reference<float>(const PostBackwardArgs&, int64_t, int64_t);

}  // namespace ehc::mhc
