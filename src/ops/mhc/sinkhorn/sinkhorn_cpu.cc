// mhc.sinkhorn_fwd and mhc.sinkhorn_bwd on SIMD lanes.
//
//   y = exp(logit - row maximum), of deepseek over its sum, + eps; then y / D, line by line, rows
//   and columns in turn; D = s + eps or max(s, eps), s = sum over the line. sinkhorn_math.h has the
//   rest and the way back. logits, comb and their gradients F32[T,n,n].
//
// Bytes a token: forward 8*n*n, backward 12*n*n.
// Algorithm: a lane is a token; the n*n values of as many tokens as there are lanes are turned into
// registers and back. True divisions, where possible with one reciprocal for a line. The way back
// keeps the divisors, (2 repeat) n vectors, and rebuilds the iterates.
// A token's bits depend on it alone.
#include "ops/mhc/shared/matrix_rows_simd.h"
#include "ops/mhc/sinkhorn/sinkhorn_simd.h"

namespace ehc::mhc::EHC_ISA {
namespace {

using simd::kLanes;

// The number of streams to unroll for; none where loops over lanes make that a minute of
// compilation.
inline constexpr int kUsualStreams = simd::kPairsTogether > 1 ? 4 : 0;

SinkhornConstants<Lanes> constants_of(const SinkhornRule& rule) {
  return {lanes(0.0f), lanes(1.0f), lanes(rule.eps)};
}

template <int kStreams>
inline void forward(const SinkhornRule& rule, const Lanes* logits, Lanes* comb) {
  const SinkhornConstants<Lanes> constants = constants_of(rule);
  Lanes y[kStreams == 0 ? kMaxMatrix : kStreams * kStreams];
  sinkhorn_start<kStreams>(rule, logits, y);
  sinkhorn_iterate<kStreams>(
      rule, constants, TrueDivision{},
      [&](Lanes* iterate, Lanes* none)
          EHC_SIMD_LAMBDA { sinkhorn_rounds<kStreams>(rule, constants, iterate, none); },
      y, static_cast<Lanes*>(nullptr));
  const int64_t n = count_of<kStreams>(rule.streams);
  for (int64_t e = 0; e < n * n; ++e) comb[e] = y[e];
}

template <int kStreams>
inline void log_forward(const SinkhornRule& rule, const Lanes* logits, Lanes* comb) {
  const int64_t n = count_of<kStreams>(rule.streams);
  Lanes of_rows[kMaxStreams], of_columns[kMaxStreams];
  for (int64_t o = 0; o < n; ++o) of_columns[o] = lanes(0.0f);
  for (int64_t round = 0; round < rule.repeat; ++round) {
    sinkhorn_log_half_step<kStreams, true>(rule, logits, of_columns, of_rows);
    sinkhorn_log_half_step<kStreams, false>(rule, logits, of_rows, of_columns);
  }
  sinkhorn_log_iterate<kStreams>(rule, logits, of_rows, of_columns, comb);
}

// `grad` of comb becomes that of the logits.
template <int kStreams>
inline void backward(const SinkhornRule& rule, const Lanes* logits, Lanes* grad) {
  const SinkhornConstants<Lanes> constants = constants_of(rule);
  Lanes divisors[2 * kMaxRepeat * kMaxStreams];
  Lanes start[kMaxMatrix], y[kStreams == 0 ? kMaxMatrix : kStreams * kStreams];
  const int64_t n = count_of<kStreams>(rule.streams);
  sinkhorn_start<kStreams>(rule, logits, y);
  for (int64_t e = 0; e < n * n; ++e) start[e] = y[e];
  sinkhorn_iterate<kStreams>(
      rule, constants, TrueDivision{},
      [&](Lanes* iterate, Lanes* of_rounds)
          EHC_SIMD_LAMBDA { sinkhorn_rounds<kStreams>(rule, constants, iterate, of_rounds); },
      y, divisors);
  sinkhorn_iterate_back<kStreams>(rule, constants, divisors, start, y, grad);
}

template <int kStreams>
inline void log_backward(const SinkhornRule& rule, const Lanes* logits, Lanes* grad) {
  Lanes potentials[(2 * kMaxRepeat + 1) * kMaxStreams], y[kMaxMatrix];
  sinkhorn_log_iterate_all<kStreams>(rule, constants_of(rule), logits, potentials);
  sinkhorn_log_back<kStreams>(rule, logits, potentials, y, grad);
}

// The matrices of tokens [first, first + count), a token in a lane.
EHC_SIMD void load_matrices(const Coefficients& from, int64_t first, int64_t count, int64_t streams,
                            Lanes* x) {
  float room[kLanes][kMatrixRoom];
  load_tokens([&](int64_t i)
                  EHC_SIMD_LAMBDA { return packed_matrix(from, first + i, streams, room[i]); },
              count, streams * streams, x);
}

EHC_SIMD void store_matrices(const Lanes* x, int64_t first, int64_t count, int64_t streams,
                             const Coefficients& to) {
  if (is_packed(to, streams)) {
    store_tokens(x, count, streams * streams,
                 [&](int64_t i) EHC_SIMD_LAMBDA { return token_values(to, first + i); });
    return;
  }
  float room[kLanes][kMatrixRoom];
  store_tokens(x, count, streams * streams, [&](int64_t i) EHC_SIMD_LAMBDA { return room[i]; });
  for (int64_t i = 0; i < count; ++i) unpack_matrix(to, first + i, streams, room[i]);
}

template <int kStreams>
inline void forward_tokens(const SinkhornForwardArgs& a, int64_t begin, int64_t end) {
  const int64_t n = count_of<kStreams>(a.rule.streams);
  for (int64_t t = begin; t < end; t += kLanes) {
    const int64_t count = end - t < kLanes ? end - t : kLanes;
    Lanes logits[kMaxMatrix], comb[kMaxMatrix];
    load_matrices(a.logits, t, count, n, logits);
    if (a.rule.form == SinkhornForm::log) {
      log_forward<kStreams>(a.rule, logits, comb);
    } else {
      forward<kStreams>(a.rule, logits, comb);
    }
    store_matrices(comb, t, count, n, a.comb);
  }
}

template <int kStreams>
inline void backward_tokens(const SinkhornBackwardArgs& a, int64_t begin, int64_t end) {
  const int64_t n = count_of<kStreams>(a.rule.streams);
  for (int64_t t = begin; t < end; t += kLanes) {
    const int64_t count = end - t < kLanes ? end - t : kLanes;
    Lanes logits[kMaxMatrix], grad[kMaxMatrix];
    load_matrices(a.logits, t, count, n, logits);
    load_matrices(a.grad_comb, t, count, n, grad);
    if (a.rule.form == SinkhornForm::log) {
      log_backward<kStreams>(a.rule, logits, grad);
    } else {
      backward<kStreams>(a.rule, logits, grad);
    }
    store_matrices(grad, t, count, n, a.grad_logits);
  }
}

}  // namespace

void sinkhorn_fwd_tokens(const SinkhornForwardArgs& args, int64_t begin, int64_t end) {
  if (args.rule.streams == 4) return forward_tokens<kUsualStreams>(args, begin, end);
  forward_tokens<0>(args, begin, end);
}

void sinkhorn_bwd_tokens(const SinkhornBackwardArgs& args, int64_t begin, int64_t end) {
  if (args.rule.streams == 4) return backward_tokens<kUsualStreams>(args, begin, end);
  backward_tokens<0>(args, begin, end);
}

}  // namespace ehc::mhc::EHC_ISA
